"""Define the configuration of a run: its options. Imports no torch."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from simpletune.adapters.methods import Adapter
from simpletune.adapters.methods.lora import Lora
from simpletune.adapters.text.option import Text
from simpletune.config.prior import NoPrior, Prior
from simpletune.data.sources.multi_source import Data, inpainting_rules
from simpletune.data.storage.place import GIB, CachePlace
from simpletune.engine.memory import Memory
from simpletune.engine.optim import Optimizer
from simpletune.engine.optim.ema import Ema
from simpletune.engine.optim.options import AdamW
from simpletune.engine.optim.schedule import Constant, Schedule
from simpletune.engine.profiling.option import Profile
from simpletune.engine.quant import Precision
from simpletune.engine.quant.precision import BF16
from simpletune.models.families import Model
from simpletune.models.objectives import Objective
from simpletune.models.objectives.flow import Flow
from simpletune.models.sd3.option import SD3
from simpletune.models.shared.buckets import STEP
from simpletune.models.shared.model_config import Shape
from simpletune.system.options import Option, Problem, join_names

DEMO = "demo:"
DEFAULT_STEPS = 1000
Kernel = Literal["auto", "flash", "cudnn", "efficient", "math"]
LOCAL_RUNS = "runs"  # local folder of runs that are also kept in an object store
LOCAL_CACHE = ".cache"  # local cache folder if the cache is in an object store
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
_STORE = re.compile(r"^(s3|gs|az)://[^/]+")
_READABLE = re.compile(r"^(s3|gs|az|https?)://[^/]+")
_LONGEST_NAME = 80  # characters of one made from a text; a run's may have 100, and moving an older run appends a number
_RESERVED_NAMES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?$", re.IGNORECASE)  # by Windows


class Train(Option):
    """Length of the run, batch size, seed, gradient clipping and handling of NaN."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Number of optimizer steps. Set this or epochs."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Number of epochs. Each epoch uses every sample once: each picture ``data.repeats`` times. Set this or steps."""
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Number of pictures per forward pass, all of the same shape: a micro-batch. auto: the largest that divides
    global_batch and is predicted to fit; the run keeps the number."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per step, over all processes; the effective batch size is batch_size times this. The last step of
    an epoch may have fewer."""
    global_batch: Annotated[int, Field(ge=1)] | None = None
    """Number of pictures per step, over all processes: a step has global_batch / batch_size micro-batches. Set this
    or gradient_accumulation."""
    reduce: Literal["fast", "exact"] = "fast"
    """Sum of the gradients of a step's micro-batches. fast: each process adds up its own, and all exchange the sums;
    the last bits depend on the number of processes. exact: by a fixed tree in fp32, so that 1, 2, 4 and 8 processes
    give the same bits (on GPUs with speed.deterministic), and their number may change during a run without changing its
    results; takes memory for one more sum of gradients for each doubling of a process's micro-batches."""
    fsdp: Literal["none", "full"] = "none"
    """How processes divide the weights in full fine-tuning. none: each holds all, with their gradients and optimizer
    state; full: each holds a part (FSDP2), and a block's whole weights only while it computes. One alone holds all."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random numbers, which depend only on it and the step."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Maximum gradient norm; null: do not clip."""
    clip: Literal["global", "per_parameter"] = "global"
    """Gradients that clip_norm limits. global: the norm over all gradients, as usual; per_parameter: the norm of each
    parameter's gradient, which changes the proportions between parameters. memory.optimizer_in_backward supports only
    per_parameter."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Action when the loss or a gradient is NaN or infinite. stop: end the run and name the samples and parameters;
    skip: leave the weights unchanged, and end the run after five skipped steps in a row. skip waits for the loss before
    each update."""

    @property
    def micro_batch(self) -> int:
        """Pictures per forward pass; 1 while batch_size is auto."""
        return 1 if self.batch_size == "auto" else self.batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches per step, over all processes."""
        return self.gradient_accumulation if self.global_batch is None else self.global_batch // self.micro_batch

    def uses_fsdp(self, processes: int) -> bool:
        """Whether this number of processes divides the weights among them."""
        return self.fsdp == "full" and processes > 1


class Speed(Option):
    """Make steps faster without using device memory."""

    attention: Kernel = "auto"
    """PyTorch kernel for the transformer's attention in training and validation. auto: PyTorch chooses among flash,
    efficient and math; the run prints its choice. Any other value forces that kernel, and is tried with all shapes of
    the run before it starts. cudnn runs only by name: its gradients have been wrong on Hopper. math needs memory
    quadratic in the number of tokens. Autoencoder and text encoders always use PyTorch's choice, without cudnn."""
    compile: bool = False
    """Compile the transformer blocks for training with torch.compile, which fuses element-wise operations. Delays the
    first step by half a minute or more and speeds up the others, so it suits long runs. Results differ only by
    rounding. Memory predictions assume the uncompiled model. Needs a C compiler, and Triton on a GPU; without them the
    run prints a note and continues uncompiled."""
    deterministic: bool = False
    """On a GPU, use only algorithms that sum in a fixed order, so that the same run on the same card gives the same
    bits. Otherwise attention and convolutions add up gradients in any order. Takes memory, which predictions count, and
    time, which they do not. An operation without such an algorithm ends the run. The CPU always sums in a fixed
    order."""
    prefetch: bool = True
    """Load the next step's latents and embeddings and draw its noise in a background thread. Does not change results.
    Ignored on the CPU, where the thread would compete with the step for cores."""
    threads: Literal["auto"] | Annotated[int, Field(ge=1, le=1024)] = "auto"
    """Number of CPU threads. auto: OMP_NUM_THREADS if set; otherwise one per core with a GPU, and on the CPU one per 50
    million parameters of the transformer, at most one per core. A resumed run keeps its number, because another number
    changes rounding."""

    def rules(self) -> Iterator[Problem]:
        """Refuse a kernel without a fixed order."""
        if self.deterministic and self.attention == "cudnn":
            yield Problem(
                "speed.attention",
                "cudnn adds up gradients in any order. Use auto or flash, or speed.deterministic=false",
            )


class Checkpoint(Option):
    """Save the state of the run."""

    every: Annotated[int, Field(ge=1)] | None = 250
    """Steps between checkpoints; null: save only at the end. A run always saves at its end."""
    keep_last: Annotated[int, Field(ge=1)] | Literal["all"] = 2
    """Number of newest checkpoints to keep, or all."""
    keep_every: Annotated[int, Field(ge=1)] | None = None
    """Also keep every checkpoint whose step is a multiple of this number, which must be a multiple of checkpoint.every.
    null: keep only the newest."""

    def kept(self, steps: Sequence[int]) -> list[int]:
        """Choose the checkpoints to keep among those of these ascending steps."""
        if self.keep_last == "all":
            return list(steps)
        newest, every = steps[-self.keep_last :], self.keep_every
        return [step for step in steps if step in newest or (every is not None and step % every == 0)]

    def most_at_once(self, steps: Sequence[int], best: bool = False) -> int:
        """How many checkpoints are on disk at most, saved after these ascending steps; ``best``: the best so far stays,
        too."""
        if not steps:
            return 0
        kept = len(self.kept(steps[:-1]))  # a new one is complete before an old one is removed
        return 1 + kept + (best and kept < len(steps) - 1)

    def in_words(self) -> str:
        """Describe which checkpoints are kept."""
        if self.keep_last == "all":
            return "keeps all"
        for_good = f" and one every {self.keep_every} steps" if self.keep_every is not None else ""
        return f"keeps the last {self.keep_last}{for_good}, and the best or the lowest validation loss"

    def rules(self) -> Iterator[Problem]:
        """Refuse to keep checkpoints that are never saved."""
        if self.keep_every is None:
            return
        if self.every is None:
            yield Problem(
                "checkpoint.keep_every",
                f"{self.keep_every} needs saved checkpoints. Set checkpoint.every to a divisor of it",
            )
        elif self.keep_every % self.every:
            near = max(1, round(self.keep_every / self.every)) * self.every
            yield Problem(
                "checkpoint.keep_every",
                f"{self.keep_every} is not a multiple of checkpoint.every, {self.every}, so those steps are not saved. "
                f"Use {near}",
            )


def _share_or_number(split: float) -> float:
    if split <= 0 or split >= 1 and not isinstance(split, int):
        raise ValueError(
            f"{split} is neither a share between 0 and 1 nor a whole number of pictures. Use 0.1, 20 or null"
        )
    return split


class EarlyStop(Option):
    """End training when the validation loss no longer falls."""

    patience: Annotated[int, Field(ge=1)] = 3
    """Evaluations in a row without a lower validation loss, after which training ends. An evaluation counts as lower if
    it is lower than the best so far by more than the standard error of their paired differences."""
    min_steps: Annotated[int, Field(ge=0)] = 0
    """Steps before which training does not end."""


class Validation(Option):
    """Draw pictures and compute the validation loss to show what the run has changed."""

    prompts: list[Annotated[str, Field(min_length=1)]] | None = None
    """Prompts to draw; null: the caption of the first sample; empty list: draw nothing."""
    images: list[Annotated[str, Field(min_length=1)]] | None = None
    """Inpainting: the picture to paint into for each of the prompts; null: with a model that inpaints, the pictures of
    the validation loss, held out if there are any."""
    masks: list[Annotated[str, Field(min_length=1)]] | None = None
    """The mask of each of the images, of its shape, white where it is painted; null: with a model that inpaints, the
    pictures' own masks if data.inpainting_mask is own, otherwise the middle half of each side."""
    negative_prompt: str | None = ""
    """Negative prompt for guidance. null, the default for SDXL: none, for which diffusers' pipeline takes zeros, unless
    the model's folder says that it takes the empty text, as other families do."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Steps between validations; null: validate only before and after training."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] = 0
    """Seed of the initial noise; prompt number n uses seed + n."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of sampling steps."""
    guidance: Annotated[float, Field(ge=1)] = 4.5
    """Classifier-free guidance scale; 1 disables guidance. Default: 4.5 for SD3, 5 for SDXL, 7.5 for SD 1.5 and
    2."""
    width: Annotated[int, Field(ge=STEP)] | None = None
    """Width in pixels; null: the training resolution."""
    height: Annotated[int, Field(ge=STEP)] | None = None
    """Height in pixels; null: the training resolution."""
    loss_samples: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = "auto"
    """Number of fixed (picture, noise level, noise) samples on which the model is evaluated before training, at every
    validation and checkpoint, and at the end: eval_loss, and drift, the change of the prediction against the base.
    auto: as many as take at most 2% of the run's forward passes, from 4 to 16; 0: do not evaluate. Without a split,
    eval_loss is computed on training pictures and also falls while the model overfits; with one, it is the validation
    loss."""
    class_prompt: Annotated[str, Field(min_length=1)] | None = None
    """Prompt of the subject's class without the trigger, such as "a photo of a dog": drift is measured for it, too."""
    unrelated_prompts: list[Annotated[str, Field(min_length=1)]] = [
        "a street in the rain at night",
        "a bowl of fruit on a wooden table",
    ]
    """Prompts that have nothing to do with the training pictures, for which drift is measured; empty list: none."""
    split: Annotated[float | int, AfterValidator(_share_or_number)] | None = None
    """Pictures to hold out from training and compute eval_loss on. A share between 0 and 1 holds out each picture by
    the hash of its bytes: the number is close to the share, and adding pictures moves none. A whole number N holds out
    the N pictures with the lowest hashes; adding pictures may move some. Copies of a picture stay together. null: hold
    out none."""
    early_stop: EarlyStop | None = None
    """End training when the validation loss no longer falls, which needs a split; null: train all steps."""

    def rules(self) -> Iterator[Problem]:
        """Check that held-out pictures are evaluated, that early stopping has a validation loss, and that every prompt
        has its picture and mask."""
        count = len(self.prompts or ())
        for name, other in (("images", "masks"), ("masks", "images")):
            given = getattr(self, name)
            if given is not None and getattr(self, other) is None:
                yield Problem(f"validation.{name}", f"needs validation.{other}, one for each of them. Add {other}")
            elif given == []:
                yield Problem(f"validation.{name}", "is empty. Leave it out, or give one for each prompt")
            elif given is not None and len(given) != count:
                yield Problem(
                    f"validation.{name}",
                    f"{len(given)} of them for {count} in validation.prompts. Give one for each prompt, in order",
                )
        if self.split is not None and self.loss_samples == 0:
            yield Problem(
                "validation.split",
                f"{self.split} holds out pictures, but validation.loss_samples 0 computes no loss on them. "
                "Use a larger loss_samples, or split null",
            )
        if self.early_stop is not None and self.split is None:
            yield Problem(
                "validation.early_stop",
                "without validation.split there is no validation loss to decide by. Set split, such as 0.1, or remove "
                "early_stop",
            )


class Tracking(Option):
    """Log metrics and pictures to trackers. A failing tracker never fails the run."""

    tensorboard: bool = True
    """Write TensorBoard event files under output.profiles."""
    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases. offline: write into the run's folder for a later `wandb sync`; online: upload during training,
    or continue offline without an API key, which it never asks for."""
    wandb_project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "simpletune"
    """Project in wandb."""
    trackio: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """Project in trackio, on this machine or in the Space that TRACKIO_SPACE_ID names; null: none. Needs trackio."""
    notify: Literal["end", "pictures"] = "end"
    """What is posted to the URL in SIMPLETUNE_NOTIFY_URL, if set. end: that the run finished, stopped or failed;
    pictures: the validation pictures, too."""


class Output(Option):
    """Folders to write to, relative to the current folder, and the prices of machines."""

    runs: str = "runs"
    """Folder for runs: configuration, metrics, samples, checkpoints and result of each. Or a URL, for example
    s3://BUCKET/runs, gs://BUCKET/runs or az://CONTAINER/runs: the run works in the folder runs, and uploads every
    checkpoint while it trains; --resume auto continues it on any machine."""
    profiles: str = "profiles"
    """Folder for TensorBoard: scalars, pictures and traces."""
    cache: str = ".cache"
    """Folder for cached latents and prompt embeddings, shared by all runs. Or a URL, for example s3://BUCKET/cache,
    gs://BUCKET/cache or az://CONTAINER/cache: they are stored there as shards, and what was read last is kept in the
    folder .cache, with everything else that is cached. https://... is only read."""
    cache_form: Literal["files", "shards"] | None = None
    """Form of cached latents, masks and prompt embeddings. files: one file for each; shards: up to 256 of them or
    64 MiB in a file, and an index, for large data sets. null: shards in an object store, otherwise files."""
    cache_local_gib: Annotated[float, Field(gt=0)] = 32.0
    """For a cache in an object store: disk space on this machine, in GiB, for what was read from there. The least
    recently used entries are removed first."""
    prices: str | None = None
    """JSON file of your prices, {CARD: {per_hour, as_of, source}}, for predictions and the report; they override those
    that ship with this package. null: use only the shipped ones."""
    report: bool = True
    """Write report.html and report.md into the run's folder at the end."""

    @property
    def folder(self) -> str:
        """Local folder of the runs."""
        return LOCAL_RUNS if _URL.match(self.runs) else self.runs

    @property
    def store(self) -> str | None:
        """URL of the object store that also keeps the runs, or None."""
        return self.runs.rstrip("/") if _URL.match(self.runs) else None

    @property
    def cache_folder(self) -> Path:
        """Local cache folder."""
        return Path(LOCAL_CACHE if _URL.match(self.cache) else self.cache)

    @property
    def place(self) -> CachePlace:
        """Location of cached latents, masks and prompt embeddings."""
        url = self.cache.rstrip("/") if _URL.match(self.cache) else None
        form = self.cache_form or ("files" if url is None else "shards")
        return CachePlace(self.cache_folder, form, url, int(self.cache_local_gib * GIB))

    def rules(self) -> Iterator[Problem]:
        """Refuse URLs of places that cannot be written to."""
        if self.store is not None and not _STORE.match(self.runs):
            yield Problem("output.runs", f"{self.runs} is not a store. Use s3://..., gs://..., az://... or a folder")
        if _URL.match(self.profiles):
            yield Problem("output.profiles", f"{self.profiles} must be a folder. Use a folder of this machine")
        if _URL.match(self.cache) and not _READABLE.match(self.cache):
            yield Problem(
                "output.cache",
                f"{self.cache} is not a store. Use s3://..., gs://..., az://..., https://... or a folder",
            )
        if _URL.match(self.cache) and self.cache_form == "files":
            yield Problem(
                "output.cache_form",
                f"files would take a request for each sample's header, and {self.cache} is an object store. Use "
                "shards, or a folder as output.cache",
            )


class TrainConfig(Option):
    """Configure a run of simpletune."""

    schema_: str | None = Field(default=None, alias="$schema")
    """Path of the JSON schema, for editors."""
    version: Literal[1] = 1
    """Version of this format."""
    about: str = ""
    """Purpose and requirements of this configuration. Overrides that make it untrue remove it: all except those of
    where a run writes and what it shows."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    """Name of the run and of its folders under runs/ and profiles/. An older run of this name moves to NAME.1, NAME.2
    or the next free number. Avoid con, nul and aux, which Windows does not allow as folder names."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device to train on. auto: the GPU, or the CPU for the demo model only; cpu: the CPU for any model."""
    model: Model = SD3()
    """Base model to fine-tune."""
    data: Data
    """Pictures and captions to train on."""
    adapter: Adapter = Lora()
    """Training method."""
    text: Text = Text()
    """What trains on the text side: embeddings of a new token, and a LoRA on the CLIP text encoders."""
    precision: Precision = BF16()
    """Precision of the base model's weights."""
    optimizer: Optimizer = AdamW()
    """Optimizer."""
    schedule: Schedule = Constant()
    """Learning-rate schedule."""
    objective: Objective = Flow()
    """Training objective and density of noise levels."""
    train: Train = Train()
    """Length of the run, batch size, seed and clipping."""
    prior: Prior = NoPrior()
    """Prior preservation: what keeps the class of a subject as it is."""
    ema: Ema | None = None
    """Exponential moving average of the trained weights; null: export the last step's weights."""
    memory: Memory = Memory()
    """Options that save memory."""
    speed: Speed = Speed()
    """Options that save time."""
    checkpoint: Checkpoint = Checkpoint()
    """When to save the state, and what to keep."""
    validation: Validation = Validation()
    """Validation pictures and validation loss."""
    profile: Profile = Profile()
    """Profiler traces."""
    tracking: Tracking = Tracking()
    """TensorBoard, wandb, trackio and notifications."""
    output: Output = Output()
    """Folders to write to."""

    @property
    def is_demo(self) -> bool:
        """Tell whether the model is the bundled demo model."""
        return self.model.pretrained.startswith(DEMO)

    def picture_size(self) -> tuple[int, int]:
        """Return (width, height) of validation pictures in pixels."""
        return self.validation.width or self.data.resolution, self.validation.height or self.data.resolution

    def steps(self, steps_per_epoch: int) -> int:
        """Return the number of optimizer steps of the whole run."""
        if self.train.epochs is not None:
            return self.train.epochs * steps_per_epoch
        return self.train.steps or DEFAULT_STEPS

    def shape_rules(self, shapes: dict[str, Shape]) -> Iterator[Problem]:
        """Check the rules that need the base model's parameter shapes."""
        yield from self.adapter.problems(shapes)
        new = self.model.new_weights
        if new is not None and not self.adapter.trains_weight(new):
            yield Problem(
                "model.inpainting",
                f"true gives {self.model.weights_from} input channels whose weights begin at zero, and adapter.method "
                f"{self.adapter.method} does not train {new}. Use adapter.method full, or partial with {new} in "
                "adapter.layers; or name an inpainting model",
            )
        trained = self.trained_modulation(shapes)
        if self.memory.modulation == "plan" and trained and not self.adapter.trains_base:
            yield Problem(
                "memory.modulation",
                f"plan needs frozen modulation weights, but adapter.targets trains {join_names(trained, 1)}. Use "
                "adapter.targets attention, or memory.modulation resident",
            )
        yield from self.memory.model_rules(len(self.model.units_among(shapes)), self.model.modulation is not None)
        yield from inpainting_rules(self.data, self.model)

    @property
    def trains_conditioning(self) -> bool:
        """Whether the text side trains what modulations are made from, the pooled prompt."""
        modulation = self.model.modulation
        reads_pooled = modulation is not None and modulation.reads_pooled
        return reads_pooled and bool(self.text.resident(self.model.text.trainable))

    def trained_modulation(self, shapes: dict[str, Shape]) -> list[str]:
        """List the modulation modules that the adapter trains."""
        if (modulation := self.model.modulation) is None:
            return []
        modules = dict.fromkeys(name.rpartition(".")[0] for name in shapes)
        return [name for name in modules if modulation.serves(name) and not self.adapter.is_untouched(name)]


def run_name(text: str, default: str = "imported") -> str:
    """Return the closest name to a text that ``TrainConfig.name`` accepts; ``default`` if no character is valid."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")[:_LONGEST_NAME].rstrip("._-")
    if not name:
        return default
    return f"{default}-{name}" if _RESERVED_NAMES.match(name) else name


def run_folder(config: TrainConfig) -> Path:
    """Return the folder of a run's results."""
    return Path(config.output.folder) / config.name


def run_url(config: TrainConfig) -> str | None:
    """Return the URL of a run in an object store; None if the run is only kept in its folder."""
    return None if config.output.store is None else f"{config.output.store}/{config.name}"


def profile_folder(config: TrainConfig) -> Path:
    """Return the folder of a run's TensorBoard files."""
    return Path(config.output.profiles) / config.name


def cache_of_bases(config: TrainConfig) -> Path | None:
    """Return the cache folder for quantised bases; None if they are not cached."""
    return config.output.cache_folder if config.memory.cache_quantised else None
