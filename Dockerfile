# Not run by those who wrote it: they had no Docker. docker build -t dtlib . && docker run -it --rm -p 8888:8888 dtlib
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home learner && install -d -o learner /course
COPY --chown=learner . /srv/dtlib
# setuptools is asked of PyPI, and torch's CPU build of PyTorch's own index.
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --constraint /srv/dtlib/requirements.lock /srv/dtlib
USER learner
WORKDIR /course
# Ranks speak through shared memory: docker run --shm-size=1g if /dev/shm is too small for your arrays.
CMD ["dtlib", "lab", "--no-browser", "--", "--ip=0.0.0.0", "--port=8888"]
