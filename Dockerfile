# docker build -t dtlib . && docker run -it --rm -p 8888:8888 --shm-size=1g dtlib
# Its steps were run in a Debian 12 root made by debootstrap, with torch's wheel from a disk. Docker itself was not run.
FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home learner && install -d -o learner /course && python3 -m venv /opt/dtlib
ENV PATH=/opt/dtlib/bin:/usr/local/bin:/usr/bin:/bin
COPY . /srv/dtlib
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir --constraint /srv/dtlib/requirements.lock /srv/dtlib
USER learner
WORKDIR /course
# Ranks exchange messages in shared memory: --shm-size=1g leaves room for large arrays.
CMD ["dtlib", "lab", "--no-browser", "--", "--ip=0.0.0.0", "--port=8888"]
