#!/usr/bin/env bash
# Streams one answer with curl, as the server sends it:  examples/chat.sh [URL] [QUESTION]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
question=${2:-What is the capital of France?}

# JSON needs quotes and backslashes escaped; nothing else that a shell argument can hold needs it here.
question=${question//\\/\\\\}
question=${question//\"/\\\"}

curl --silent --show-error --fail-with-body --no-buffer "$url/v1/chat/completions" \
  --header 'Content-Type: application/json' \
  --data @- <<JSON
{
  "messages": [{"role": "user", "content": "$question"}],
  "max_tokens": 64,
  "stream": true
}
JSON
