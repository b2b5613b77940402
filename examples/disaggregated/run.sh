#!/usr/bin/env bash
# Serves the small model with one prefill and two decode workers, sends requests, kills a worker, and shows the state.
# Usage: examples/disaggregated/run.sh [PORT]   (the metrics are at PORT + 1)
set -euo pipefail
cd "$(dirname "$0")"
port=${1:-18000}
neso=${NESO:-neso}
url=http://127.0.0.1:$port/v1/completions

$neso serve neso-pilot --host 127.0.0.1 --http-port "$port" --metrics-port $((port + 1)) --allow-grpc false --openai-port 0 \
    --prefill-workers 1 --decode-workers 2 --min-remote-prefill 64 &
server=$!
texts=$(mktemp -d)
trap 'kill $server; wait $server || true; rm -r "$texts"' EXIT
until curl -sf "http://127.0.0.1:$port/v2/health/ready"; do kill -0 $server; sleep 0.2; done

ask() {  # prints the generated text
    curl -sS "$url" -H 'Content-Type: application/json' -d "{\"model\": \"neso-pilot\", \"temperature\": 0,
        \"max_tokens\": $2, \"ignore_eos\": true, \"prompt\": \"$1\"}" | python3 -c 'import json, sys
print(json.load(sys.stdin)["choices"][0]["text"])'
}

long=$(printf 'Servers have queues, and workers pull from them. %.0s' {1..40})
echo "--- a long prompt: computed by the prefill worker, continued by a decode worker"
ask "$long" 24
echo "--- the same text while a decode worker is killed"
ask "1 $long" 400 > "$texts/before"
ask "1 $long" 400 > "$texts/after" &
client=$!
sleep 0.2
kill -9 "$(pgrep -P $server -f '"name":"decode-1"')"
wait $client
cmp "$texts/before" "$texts/after" && echo "equal"
$neso cluster status --url "http://127.0.0.1:$((port + 1))/metrics"
