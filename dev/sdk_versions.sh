#!/bin/sh
# The server's tests with old and new versions of the vendors' clients, each pair in an environment of its own.
#
#     dev/sdk_versions.sh [pytest arguments]
#
# Environments lie in $KVFOLD_SDKS (default: build/sdks) and are kept; everything but the clients comes from the Python
# that runs this ($PYTHON, default: python3), which needs what the tests need. Exit code 1 if any pair fails.
set -eu
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
folder=${KVFOLD_SDKS:-build/sdks}
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
failed=
for pair in "0.75.0 2.54.0" "1.13.0 3.22.1" "2.8.0 3.49.0"; do
    anthropic=${pair% *} openai=${pair#* }
    name=anthropic-$anthropic-openai-$openai
    if [ ! -e "$folder/$name/ready" ]; then
        "$python" -m venv --clear "$folder/$name"
        own=$("$folder/$name/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        echo "$site" >"$own/parent.pth"
        "$folder/$name/bin/python" -m pip install --quiet "anthropic==$anthropic" "openai==$openai"
        touch "$folder/$name/ready"
    fi
    echo "== anthropic $anthropic, openai $openai"
    "$folder/$name/bin/python" -m pytest -p no:cacheprovider tests/serve/api/test_anthropic.py tests/serve/api/test_openai.py \
        tests/serve/test_tool_replies.py tests/serve/test_prompt_cache.py tests/serve/cache/test_explain.py \
        tests/serve/test_restart.py "$@" ||
        failed="$failed $name"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
