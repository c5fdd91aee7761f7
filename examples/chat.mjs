// Streams one answer with nothing but Node 18's fetch:  node examples/chat.mjs [URL] [QUESTION]

const url = process.argv[2] ?? 'http://127.0.0.1:8000';
const question = process.argv[3] ?? 'What is the capital of France?';

const response = await fetch(`${url}/v1/chat/completions`, {
  method: 'POST',
  headers: { 'Content-Type': 'application/json' },
  body: JSON.stringify({
    messages: [{ role: 'user', content: question }],
    max_tokens: 64,
    stream: true,
  }),
});
if (!response.ok) {
  console.error(`${response.status}: ${await response.text()}`);
  process.exit(1);
}

// Server-sent events: "data: {json}" lines, the last of them "data: [DONE]". A line can be cut anywhere.
let rest = '';
for await (const bytes of response.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + bytes).split('\n');
  rest = lines.pop();
  for (const line of lines) {
    if (!line.startsWith('data: ') || line === 'data: [DONE]') continue;
    const event = JSON.parse(line.slice(6));
    if (event.error) throw new Error(event.error.message);
    process.stdout.write(event.choices[0]?.delta.content ?? '');
  }
}
process.stdout.write('\n');
