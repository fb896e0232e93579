#!/bin/sh
# Make the environment that answer.py runs in: kvpress with the transformers it pins, and the quantisers of transformers.
#     sh benchmarks/peers/environment.sh FOLDER [PYTHON]
set -eu
folder=${1:?give the folder of the new environment}
"${2:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.13.0 transformers==5.2.0 kvpress==0.5.5 optimum-quanto==0.2.7 hqq==0.2.8.post1
"$folder/bin/python" -c "import kvpress, optimum.quanto, hqq; print('ready')"
