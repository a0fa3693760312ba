"""Start and stop a server: from the command line's arguments to a listening socket and a clean shutdown."""

from __future__ import annotations

import argparse
import gc
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from starlette.types import ASGIApp

from simpletune.adapters.files.attach import holds_hypernetwork
from simpletune.apps.http import EVERYWHERE, LOOPBACK, HttpServer, bind, is_loopback, loopback_hosts, url_of
from simpletune.apps.serve.app import HttpOptions, make_app
from simpletune.apps.serve.generator import ImageGenerator
from simpletune.apps.serve.limits import GUIDANCE, Limits
from simpletune.apps.serve.metrics import Metrics
from simpletune.apps.serve.models import ServedModels
from simpletune.apps.serve.requests import BASE, Capabilities
from simpletune.apps.serve.worker import SupportsGenerate, Worker
from simpletune.commands.generate.generate import GenerationSession, open_session
from simpletune.runs.stack import require_lora_of
from simpletune.runs.text_side import embedding_of
from simpletune.runs.weights import Embedding, run_result
from simpletune.runs.weights_names import find_lora, refuse_strength
from simpletune.stages.sample import ImageRequest
from simpletune.system.console import say
from simpletune.system.options import UserError
from simpletune.system.shell import typed_path
from simpletune.system.startup import freeze

PORT = 8000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Service:
    """A server that is ready to run; its socket already listens. ``load`` creates the image generator in the worker's
    thread."""

    def __init__(
        self,
        load: Callable[[], SupportsGenerate],
        capabilities: Capabilities,
        bound: socket.socket,
        options: HttpOptions,
    ):
        metrics = Metrics()
        self.capabilities = capabilities
        self.socket = bound
        self.address = url_of(bound)
        self.worker = Worker(load, capabilities.limits, metrics)
        self.server = ImageServer(make_app(self.worker, capabilities, metrics, options), self.worker)

    def run(self) -> None:
        """Serve until stopped; raise the error that ended the worker, such as a UserError while loading the model."""
        self.worker.start()
        self.server.run(sockets=[self.socket])
        self.worker.stop(at_once=True)
        self.worker.join()
        if self.worker.failure is not None:
            raise self.worker.failure


class ImageServer(HttpServer):
    """A server that ends after its worker; until then it answers, if only with errors."""

    def __init__(self, app: ASGIApp, worker: Worker):
        super().__init__(app, connections=4 * worker.limits.queue + 64, grace=30)
        self.worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish the current request on the first signal; cancel it on the second."""
        again = self.worker.state == "stopping"
        name = signal.Signals(sig).name
        say(f"{name}: {'cancelling the request' if again else 'finishing the current request; repeat to cancel it'}")
        self.worker.stop(at_once=again)

    async def on_tick(self, counter: int) -> bool:
        """Decide whether to end; uvicorn calls this ten times a second."""
        self.should_exit = self.should_exit or self.worker.state == "ended"
        return await super().on_tick(counter)


def run(args: argparse.Namespace) -> None:
    """Serve the models that the arguments name (``cli.serve.serve_arguments``), until a signal arrives."""
    service = build(args)
    if not is_loopback(service.socket):
        say(
            f"warning: listening on {service.socket.getsockname()[0]}: anyone who can reach this machine can draw. "
            "There is no password and no encryption; put a proxy with both in front"
        )
    say(f"serving {service.capabilities.describe()} at {service.address}; loading")
    service.run()
    say("stopped")


def build(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Service:
    """Build everything except the model, which the worker loads. Vertex AI passes port and paths in the environment."""
    wanted = environment.get("AIP_HTTP_PORT", "")
    if wanted and not (wanted.isdecimal() and int(wanted) < 65536):
        raise UserError(f"AIP_HTTP_PORT: {wanted} is not a port. Use a number from 0 to 65535")
    host = args.host or (EVERYWHERE if wanted else LOOPBACK)  # Vertex AI's port is served on all interfaces
    port = args.port if args.port is not None else int(wanted or PORT)
    routes: dict[str, tuple[str, ...]] = {}
    for name in ("predict", "health"):  # the default path, and Vertex AI's if it names one
        variable = f"AIP_{name.upper()}_ROUTE"
        path = environment.get(variable, f"/{name}")
        if not path.startswith("/") or set(path) & set("{}?#"):
            raise UserError(f"{variable}: {path} is not a path. Start it with / and use none of {{ }} ? #")
        routes[name] = tuple(dict.fromkeys((f"/{name}", path)))
    session = open_session(args)
    served = _served_models(session, args.lora, vars(args).get("embedding") or [])
    model = session.config.model
    network = model.architecture
    step = network.generated_multiple
    most = network.largest_side // step * step  # by the model's positions
    side = min(Limits.side // step * step, most) if args.max_side is None else args.max_side
    if not step <= side <= most or side % step:
        raise UserError(f"--max-side: {side} is not allowed. Use a multiple of {step} from {step} to {most}")
    limits = Limits(
        side,
        step,
        args.max_steps,
        args.max_instances,
        args.max_prompt,
        args.max_body,
        queue=args.queue,
        seconds=args.timeout,
    )
    option = session.config.validation  # the defaults for a request are those of the run's validation pictures
    width, height = (min(each, side) for each in session.config.image_size())
    steps, guidance = min(option.steps, limits.steps), min(option.guidance, GUIDANCE)
    negative = model.text.steered_from(option.negative_prompt)
    defaults = ImageRequest("", option.seed, negative, width, height, steps, guidance)
    tuned = served.tuned[0] if served.tuned else None
    capabilities = Capabilities(served.names, defaults, limits, model.autoencoder.downsampling, tuned, model.inpaints)

    def load() -> ImageGenerator:
        generator = ImageGenerator(session.config, served, session.device, side)
        gc.collect()
        freeze()  # loaded objects stay: scanning them for garbage takes longer than generating a tiny picture
        return generator

    bound = bind(host, port)
    hosts = loopback_hosts(host) if is_loopback(bound) else None
    return Service(load, capabilities, bound, HttpOptions(routes["predict"], routes["health"], args.predictions, hosts))


def _served_models(session: GenerationSession, given: list[str], common: Sequence[str] = ()) -> ServedModels:
    """Collect the run's result (a LoRA, a full model or embeddings) under the run's name, and the models given by
    option. Raises UserError if a name is invalid or used twice, or a file is missing."""
    loras, tuned, embeddings = dict[str, Path](), None, dict[str, tuple[Embedding, ...]]()
    if session.run is not None:
        if session.strength != 1:  # each request has its own
            best, checkpoint = f"{session.run}@best", f"{session.run}@{session.step}"
            refuse_strength(best, checkpoint, session.strength, "--run: ")
        result = run_result(session.run, step=session.step)
        name = session.run.resolve().name + (f"-step-{session.step}" if session.step is not None else "")
        own = re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip("._-")[:64]
        own = own if own not in ("", BASE) else "run"
        if result.embeddings:
            embeddings[own] = result.embeddings
        if result.lora is not None:
            loras[own] = result.lora
        elif result.denoiser is not None or result.trained is not None:
            tuned = (own, result)
    for text in given:
        name, _, file = text.partition("=")
        if not NAME.fullmatch(name) or not file:
            raise UserError(
                f"--lora: {text} is not NAME=FILE. Use a name of at most 64 letters, digits, '.', '_' and '-'"
            )
        if name in ServedModels(loras, tuned, embeddings).names:
            raise UserError(f"--lora: {name} is already in use. Give {file} another name")
        file = typed_path(file)
        named = find_lora(file, "--lora: ", f"Serve it by --run {file}", strength=False)
        assert named.lora is not None
        if not holds_hypernetwork(named.lora):
            require_lora_of(f"--lora: {file}", named.lora, session.config)
        loras[name] = named.lora
        if named.embeddings:
            embeddings[name] = tuple((each, None) for each in named.embeddings)
    return ServedModels(loras, tuned, embeddings, tuple(embedding_of(text) for text in common))
