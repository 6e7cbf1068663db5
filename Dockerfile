# A server image. Build: docker build -t slipstream . Run, with a GPU where there is one:
#   docker run --rm --gpus all -p 127.0.0.1:8000:8000 -e SLIPSTREAM_API_KEY -v ~/.cache/huggingface:/home/slipstream/.cache/huggingface slipstream MODEL
# torch's wheel brings CUDA; the host needs the driver and the NVIDIA container toolkit only.
FROM python:3.12-slim

# Triton compiles a small launcher for each kernel on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 slipstream
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY slipstream slipstream
RUN pip install --no-cache-dir -c constraints.txt '.[server,hub,gguf]'

USER slipstream
EXPOSE 8000
# In a container every interface is the container's own; publish the port on 127.0.0.1, and set SLIPSTREAM_API_KEY.
ENTRYPOINT ["slipstream", "serve", "--host", "0.0.0.0", "--port", "8000", "--log-format", "json"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# SIGTERM drains; give it longer than --drain-seconds (docker stop -t 40).
STOPSIGNAL SIGTERM
