# simpletune in a container: training and inference on an NVIDIA GPU.
#
#   docker build -t simpletune .
#   docker run --gpus all -e HF_TOKEN -v "$PWD/my_pictures:/home/simpletune/my_pictures:ro" -v simpletune-runs:/home/simpletune/runs \
#     -v simpletune-cache:/home/simpletune/.cache simpletune train sd3_medium_lora_8gb data.path=my_pictures
#
# Pictures over HTTP (docs/how-to/serve.md): docker run --gpus all -p 127.0.0.1:8000:8000 -v simpletune-runs:/home/simpletune/runs \
#   -v simpletune-cache:/home/simpletune/.cache simpletune serve --host 0.0.0.0
#
# The pages in a browser: docker compose up (compose.yaml)
#
# It runs as user 1001. For runs in a folder of yours, give --user "$(id -u):$(id -g)" -v "$PWD/runs:/home/simpletune/runs", and
# the same for .cache in place of a volume that user 1001 has filled.
#
# The host needs driver 580 or newer and the NVIDIA Container Toolkit. For an older driver, use a CUDA 12 image and the
# index of its torch builds (see README): --build-arg CUDA_IMAGE=... --build-arg SIMPLETUNE_TORCH_INDEX=...
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${CUDA_IMAGE} AS build
# Versions of Ubuntu's packages come with the image, and an older one is soon gone from its archive.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY simpletune/ simpletune/
COPY configs/ configs/
# The context has no git: docker build --build-arg VERSION=1.2.3 names a version other than pyproject.toml's fallback.
ARG VERSION=
RUN python3 -m venv /build \
    && SETUPTOOLS_SCM_PRETEND_VERSION_FOR_SIMPLETUNE=${VERSION} /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheel . \
    && python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; extras = project["optional-dependencies"]; print(*project["dependencies"], *extras["serve"], *extras["remote"], sep="\n")' \
        >/wheel/requirements.txt

FROM ${CUDA_IMAGE}
# A C compiler and Python's headers: Triton builds its launchers with them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*

# The packages first: a change of the code alone does not install them again. torch may have an index of its own.
ARG SIMPLETUNE_TORCH_INDEX=https://pypi.org/simple
COPY --from=build /wheel/requirements.txt /tmp/
RUN python3 -m venv /opt/simpletune \
    && /opt/simpletune/bin/pip install --no-cache-dir --index-url "${SIMPLETUNE_TORCH_INDEX}" "$(grep '^torch[<>=]' /tmp/requirements.txt)" \
    && /opt/simpletune/bin/pip install --no-cache-dir -r /tmp/requirements.txt
RUN --mount=type=bind,from=build,source=/wheel,target=/wheel \
    /opt/simpletune/bin/pip install --no-cache-dir --no-deps /wheel/*.whl

# Any user may write here, --user as well: Docker gives a new volume the owner and the mode of the folder below it. USER is
# what torch asks for where the user has no entry in /etc/passwd.
RUN useradd --uid 1001 --create-home simpletune \
    && mkdir /home/simpletune/.cache /home/simpletune/runs \
    && chmod 1777 /home/simpletune /home/simpletune/.cache /home/simpletune/runs
ENV PATH=/opt/simpletune/bin:$PATH HOME=/home/simpletune USER=simpletune PYTHONUNBUFFERED=1
WORKDIR /home/simpletune
USER 1001
# The hub's models, latents and embeddings
VOLUME /home/simpletune/.cache
EXPOSE 6006 8000 8100
ENTRYPOINT ["simpletune"]
CMD ["train", "demo"]
