#!/usr/bin/env bash
# The wheels that a lent machine with a GPU lacks, in a folder to carry there: benchmarks/wheels.sh [FOLDER]
#
# It is taken to have Python 3.12, PyTorch 2.11, transformers 5.17, accelerate and peft with what these need, pytest and
# no network. Versions are the project's own: constraints.txt, and the peer's requirements. What of pyarrow and pandas
# nothing here loads is left out, since 64 MiB travel at most. There:
#
#   python3 -m pip install -q --no-index --no-deps --no-compile --target site FOLDER/*.whl
#   PYTHONPATH=.:site make gpu-day
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.whl}
pins="constraints.txt benchmarks/peer/requirements.txt benchmarks/peer/requirements-trl-grpo.txt"
oppo="annotated-types anyio cyclopts docstring_parser pydantic pydantic_core rich-rst rich markdown-it-py mdurl
    Pygments sniffio structlog tomli_w typing-inspection typing_extensions idna psutil"
tests="hypothesis sortedcontainers outcome trio attrs pytest-asyncio"
peer="trl datasets dill multiprocess pandas pyarrow python-dateutil tzdata xxhash fsspec httpx httpcore certifi h11"
mkdir -p "$folder"
for name in $oppo $tests $peer; do
    awk -F== -v name="$name" 'tolower($1) == tolower(name) && !n++ { print } END { exit !n }' $pins ||
        { echo "no pin of $name in $pins" >&2; exit 1; }
done > "$folder/wheels.txt"
pip=${PIP:-.venv/bin/pip}
"$pip" download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --dest "$folder" -r "$folder/wheels.txt"
for wheel in "$folder"/pyarrow-*.whl "$folder"/pandas-*.whl; do
    zip -qd "$wheel" '*/include/*' '*/tests/*' '*flight*' '*s3*' > /dev/null
done
size=$(($(cat "$folder"/*.whl | wc -c) >> 20))
echo "$(ls "$folder"/*.whl | wc -l) wheels of $size MiB in $folder; 64 MiB travel at most"
[ "$size" -lt 64 ]
