#!/usr/bin/env bash
# The wheel in an empty environment, away from the clone, as a user without the repository has it: demo, init, 20 steps of
# training, chat and a server. Takes the interpreter and the file of pinned versions.
set -euo pipefail
python=$1 constraints=$(realpath "$2")
folder=$(mktemp -d)
server=""
finish() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
  rm -rf "$folder"
}
trap finish EXIT

"$python" -m build --wheel --outdir "$folder/dist" . >/dev/null
"$python" -m venv "$folder/venv"
wheel=$(echo "$folder"/dist/*.whl)
"$folder/venv/bin/pip" install -qq --disable-pip-version-check -c "$constraints" "${wheel}[serve]"
cd "$folder"
export JAX_PLATFORMS=cpu PATH="$folder/venv/bin:$PATH"
python -c "import mercury_jax; assert mercury_jax.__file__.startswith('$folder'), mercury_jax.__file__"

mercury demo </dev/null | tail -n 3
mercury init mine.py
mercury train mine.py --steps 20 --log-every 10 | tail -n 1
printf '347+585=\n' | mercury chat | grep -x 932
printf '4+38=\n' | mercury chat --model runs/mine/model --max-tokens 8 --json | grep -q '"forwards"'

port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
mercury serve --port "$port" --slots 1 &
server=$!
for _ in $(seq 120); do
  if python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/ready')" 2>/dev/null; then break; fi
  kill -0 "$server"
  sleep 0.5
done
python - "$port" <<'PY'
import json, sys, urllib.request

url = f"http://127.0.0.1:{sys.argv[1]}"
body = {"model": "nano", "messages": [{"role": "user", "content": "389+784="}]}
asked = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
answer = json.load(urllib.request.urlopen(asked))["choices"][0]["message"]["content"]
page = urllib.request.urlopen(f"{url}/").read().decode()
recording = json.load(urllib.request.urlopen(f"{url}/playground/static/demo.json"))
assert answer == "1173" and "Mercury playground" in page and recording["runs"], (answer, page[:80])
print("served:", answer)
PY
kill "$server"
wait "$server" || [ $? -eq 143 ]
server=""
echo "the wheel works"
