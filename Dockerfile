# SeqVAE in a container, for CPUs: docker build -t seqvae .
# For GPUs by NVIDIA, with the name of a CUDA version of PyTorch: docker build --build-arg TORCH=cu128 -t seqvae .
# The directory that it runs in is /work:
#   docker run --rm --init --user "$(id -u):$(id -g)" -v "$PWD:/work" seqvae train --data_dir my_data.parquet
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG TORCH=cpu
WORKDIR /build
# PyTorch from its own index, without what it needs: the next line finds that where everything else is pinned.
COPY constraints.txt .
RUN python -m venv /opt/seqvae && /opt/seqvae/bin/python -m pip install --no-cache-dir --no-deps \
    --index-url "https://download.pytorch.org/whl/${TORCH}" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY seqvae seqvae
RUN /opt/seqvae/bin/python -m pip install --no-cache-dir -c constraints.txt ".[text,eval]"

FROM python:${PYTHON}-slim
COPY --from=build /opt/seqvae /opt/seqvae
# Caches lie in the home directory, in which any user of --user may write.
RUN useradd --uid 1000 --no-create-home --home-dir /home/seqvae seqvae \
    && install -d -m 1777 /home/seqvae && install -d -o seqvae /work
ENV PATH="/opt/seqvae/bin:${PATH}" HOME=/home/seqvae
USER seqvae
WORKDIR /work
ENTRYPOINT ["seqvae"]
CMD ["--help"]
