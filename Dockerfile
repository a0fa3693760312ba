# simpletune in a container: training and inference on an NVIDIA GPU.
#
#   docker build -t simpletune .
#   docker run --gpus all -e HF_TOKEN -v "$PWD/data:/simpletune/data" -v "$PWD/runs:/simpletune/runs" \
#     -v "$PWD/profiles:/simpletune/profiles" -v "$PWD/hub:/simpletune/hub" -v "$PWD/.cache:/simpletune/.cache" simpletune \
#     ./train.sh configs/sd3_medium_lora_r16_int8.json data.path=data/my_pictures
#
# Pictures over HTTP (docs/how-to/serve.md): docker run --gpus all -p 127.0.0.1:8000:8000 -v "$PWD/runs:/simpletune/runs" \
#   -v "$PWD/hub:/simpletune/hub" simpletune .venv/bin/simpletune serve --host 0.0.0.0
#
# The pages in a browser: -p 127.0.0.1:8100:8100 ... simpletune .venv/bin/simpletune web --host 0.0.0.0 --token
#
# The host needs driver 580 or newer and the NVIDIA Container Toolkit. For an older driver, use a CUDA 12 image and the
# index of its torch builds (see README): --build-arg CUDA_IMAGE=... --build-arg SIMPLETUNE_TORCH_INDEX=...
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04
FROM ${CUDA_IMAGE}

# A C compiler and Python's headers: Triton builds its launchers with them.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev ca-certificates \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /simpletune
# No card is seen while an image is built: without an index, set-up would take a torch without CUDA.
ARG SIMPLETUNE_TORCH_INDEX=https://pypi.org/simple
ENV HF_HOME=/simpletune/hub PYTHONUNBUFFERED=1

# The packages first: a change of the code alone does not install them again.
COPY pyproject.toml LICENSE ./
COPY simpletune/setup.sh simpletune/__init__.py simpletune/
RUN bash -c 'source simpletune/setup.sh && simpletune_setup . run' \
    && .venv/bin/python -m pip install --no-cache-dir -e ".[serve]"

COPY train.sh README.md ./
COPY simpletune/ simpletune/
COPY configs/ configs/
COPY inference/ inference/
COPY profiles/ profiles/

EXPOSE 6006 8000 8100
CMD ["./train.sh"]
