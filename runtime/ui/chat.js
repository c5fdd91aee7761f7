// How does the page talk to the model? One conversation, streamed, with each answer's receipt as a bar.

import { element, duration, count } from "/ui/shown.js";

const by = (id) => document.getElementById(id);

export function chat(headers, afterwards) {
  const said = [];
  let running = null;

  by("clear").addEventListener("click", () => { said.length = 0; by("messages").replaceChildren(); });
  by("stop").addEventListener("click", () => running?.abort());
  by("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); by("ask").requestSubmit(); }
  });
  by("ask").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = by("prompt").value.trim();
    if (!text || running) return;
    by("prompt").value = "";
    said.push({ role: "user", content: text });
    show("user", text);
    running = new AbortController();
    toggle(true);
    const shown = show("assistant", "");
    try {
      const answer = await stream(said, headers(), running.signal, (part) => { shown.textContent += part; scroll(); });
      said.push({ role: "assistant", content: answer.text });
      if (!answer.text) shown.textContent = "(no text)";
      if (answer.receipt) shown.after(receiptBar(answer));
    } catch (error) {
      said.pop();
      if (error.name !== "AbortError") { shown.classList.add("error"); shown.textContent = error.message; }
    } finally {
      running = null;
      toggle(false);
      scroll();
      afterwards();
    }
  });

  function toggle(busy) {
    by("send").hidden = busy;
    by("stop").hidden = !busy;
  }

  function show(role, text) {
    const made = element("div", `message ${role}`, text);
    by("messages").append(made);
    scroll();
    return made;
  }

  function scroll() { by("messages").scrollTop = by("messages").scrollHeight; }
}

async function stream(messages, headers, signal, onText) {
  const began = performance.now();
  const body = { messages, stream: true, cache_receipt: true, max_tokens: Number(by("max-tokens").value) || 128, stream_options: { include_usage: true } };
  const answer = await fetch("/v1/chat/completions", { method: "POST", signal, headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error?.message ?? `HTTP ${answer.status}`);
  const result = { text: "", receipt: null, usage: null, firstS: null };
  let rest = "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return result;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const part = (choice?.delta?.reasoning ?? "") + (choice?.delta?.content ?? "");
      if (part) {
        result.firstS ??= (performance.now() - began) / 1000;
        result.text += choice.delta.content ?? "";
        onText(part);
      }
      result.receipt = choice?.cache_receipt ?? result.receipt;
      result.usage = event.usage ?? result.usage;
    }
  }
}

function receiptBar({ receipt, usage, firstS }) {
  const restored = receipt.credited_tokens, computed = receipt.prompt_tokens - restored;
  const generated = usage?.completion_tokens ?? 0;
  const all = receipt.prompt_tokens + generated;
  const tier = receipt.tier ?? "device";
  const bar = element("div", "bar");
  for (const [name, n] of [[tier, restored], ["computed", computed], ["generated", generated]]) {
    const part = element("span", name);
    part.style.width = `${(100 * n) / all}%`;
    part.title = `${name}: ${count(n)} tokens`;
    bar.append(part);
  }
  const parts = [
    restored ? `restored ${count(restored)} from ${tier}${receipt.restore_s ? ` in ${duration(receipt.restore_s)}` : ""}` : `restored nothing${why(receipt)}`,
    `computed ${count(computed)}${receipt.prefill_s ? ` in ${duration(receipt.prefill_s)}` : ""}`,
    `generated ${count(generated)}`,
  ];
  if (firstS !== null) parts.push(`first text after ${duration(firstS)}`);
  const made = element("div", "receipt", bar, parts.join(" · "));
  made.dataset.tier = restored ? tier : "";
  made.dataset.restored = restored;
  return made;
}

function why(receipt) {
  return receipt.missed_because?.cause ? ` (${receipt.missed_because.cause.replaceAll("_", " ")})` : "";
}
