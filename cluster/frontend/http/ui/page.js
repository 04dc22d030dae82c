// The page at /ui: polls ui/status and draws it; chats through v1/chat/completions.
// All that comes from the server is data: it becomes text nodes and attributes, never markup.
"use strict";

const POLL_MS = 1000, ANSWER_MS = 5000, SLOWEST_MS = 10000;
const GAP_S = 5, SHORTEST_S = 60, LONGEST_S = 600; // of the picture of roles
const MOST_ROWS = 32;
const KEY = "diptych-api-key"; // in the tab's own storage
const SVG = "http://www.w3.org/2000/svg";
const ROLES = ["prefill", "decode", "mixed"];

const $ = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

/** An element with attributes and children; strings become text. */
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

// ---- the server --------------------------------------------------------------------------------------------------

/** A response with a status of 200. Throws `Refused` for any other. */
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error?.message ?? `status ${response.status}`);
}

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The data of server-sent events, as they arrive. */
async function* dataOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}

// ---- words -------------------------------------------------------------------------------------------------------

function span(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)} %`);

/** Output tokens per second between two answers of one gateway; null where that is unknown. */
function tokenRate(before, now) {
  if (!before || before.gateway.name !== now.gateway.name) return null;
  const seconds = now.gateway.uptime_s - before.gateway.uptime_s;
  const tokens = now.gateway.output_tokens - before.gateway.output_tokens;
  return seconds > 0 && tokens >= 0 ? tokens / seconds : null;
}

// ---- tables ------------------------------------------------------------------------------------------------------

function blocks(used, total) {
  if (!total) return "–";
  const meter = element("meter", { min: 0, max: total, value: used, optimum: 0, low: 0.7 * total, high: 0.9 * total });
  return element("span", {}, meter, `${used} of ${total}`);
}

const cell = (content, kind = "") => element("td", kind ? { class: kind } : {}, content);
const role = (name) => element("span", { class: ROLES.includes(name) ? `role ${name}` : "role" }, name);

function fill(id, rows, empty, columns) {
  const nothing = element("tr", {}, element("td", { class: "empty", colspan: columns }, empty));
  $(id).replaceChildren(...(rows.length ? rows : [nothing]));
}

function poolRow(pool) {
  return element("tr", { class: "pool" },
    element("td", { title: pool.model }, pool.name), cell(pool.role ? role(pool.role) : ""),
    cell(`${pool.ready} of ${pool.wanted} ready`, pool.ready ? "" : "dead"),
    cell(pool.running, "number"), cell(pool.waiting, "number"), cell(blocks(pool.used_blocks, pool.total_blocks)));
}

function workerRows(worker) {
  const state = ["ready", "starting", "draining", "dead"].includes(worker.state) ? worker.state : "";
  const restarts = worker.restarts ? `, ${worker.restarts} restart${worker.restarts > 1 ? "s" : ""}` : "";
  const row = element("tr", { class: "worker" },
    cell(worker.name), cell(role(worker.role)), cell(worker.state + restarts, state),
    cell(worker.running, "number"), cell(worker.waiting, "number"),
    cell(blocks(worker.used_blocks, worker.total_blocks)));
  if (!worker.trouble) return [row];
  const why = element("td", { class: worker.state === "ready" ? "empty" : "trouble", colspan: 6 }, worker.trouble);
  return [row, element("tr", { class: "worker" }, why)];
}

function streamRow(stream) {
  return element("tr", {},
    element("td", { title: stream.id }, stream.id), cell(stream.class), cell(stream.phase),
    cell(stream.prefill_worker), cell(stream.decode_worker), cell(stream.prompt_tokens, "number"),
    cell(stream.output_tokens, "number"), cell(span(stream.age_s), "number"));
}

/** Of several models the chat asks the chosen one. */
function showModels(models) {
  if ($("model").options.length === models.length) return;
  $("model").replaceChildren(...models.map((each) => element("option", {}, each.name)));
  $("model").hidden = models.length < 2;
}

function showStatus(status, rate) {
  showModels(status.models);
  $("cluster").textContent = `${status.name} · ${status.models.map((each) => each.name).join(", ")} · ${status.gateway.name}`;
  const figures = [
    ["requests", `${status.gateway.active} of ${status.gateway.max_requests}`],
    ["queued", status.gateway.queued],
    ["tokens/s", rate === null ? "–" : rate.toFixed(1)],
    ["up", span(status.gateway.uptime_s)],
  ];
  const pairs = figures.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  $("figures").replaceChildren(...pairs);
  const rows = status.pools.flatMap((pool) => [
    poolRow(pool),
    ...status.workers.filter((worker) => worker.pool === pool.name).flatMap(workerRows),
  ]);
  const left = status.num_workers - status.workers.length;
  if (left) rows.push(element("tr", {}, element("td", { class: "empty", colspan: 6 }, `and ${left} more workers`)));
  fill("workers", rows, "no worker yet", 6);
  fill("streams", status.streams.map(streamRow), "no request is running", 8);
  $("attainment").hidden = !status.classes.length;
  fill("classes", status.classes.map((each) => element("tr", {},
    cell(each.model ? `${each.name} · ${each.model}` : each.name), cell(each.requests, "number"),
    cell(percent(each.ttft), "number"), cell(percent(each.tpot), "number"), cell(percent(each.both), "number"))), "", 5);
  const events = status.events.map((event) => element("li", {},
    element("time", {}, `${span(event.age_s)} ago`),
    element("span", {}, [event.kind, event.worker, event.text].filter(Boolean).join(" · "))));
  $("events").replaceChildren(...(events.length ? events : [element("li", { class: "empty" }, "none yet")]));
}

// ---- roles over time ---------------------------------------------------------------------------------------------

/** What this page has seen: for each worker its stretches {kind, from, to}, in seconds, at most LONGEST_S of them. */
class RoleHistory {
  workers = new Map();
  began = null;

  add(workers, now) {
    this.began ??= now;
    for (const worker of workers) {
      const isThere = worker.state === "ready" || worker.state === "draining";
      const kind = isThere && ROLES.includes(worker.role) ? worker.role : "away";
      const stretches = this.workers.get(worker.name) ?? [];
      this.workers.set(worker.name, stretches);
      const last = stretches.at(-1);
      const isSeamless = last && now - last.to <= GAP_S;
      if (isSeamless) last.to = now;
      if (!isSeamless || last.kind !== kind) stretches.push({ kind, from: now, to: now });
    }
    for (const [name, stretches] of this.workers) {
      while (stretches.length && stretches[0].to < now - LONGEST_S) stretches.shift();
      if (!stretches.length) this.workers.delete(name);
    }
  }
}

function drawRoles(history, now) {
  const svg = $("roles"), width = svg.clientWidth, label = Math.min(140, width / 4), row = 18;
  const names = [...history.workers.keys()].sort();
  const rows = names.slice(0, MOST_ROWS);
  const shown = Math.min(LONGEST_S, Math.max(SHORTEST_S, now - history.began));
  const x = (at) => label + Math.max(0, (at - now + shown) / shown) * (width - label);
  const parts = [];
  const height = rows.length * row;
  const step = [15, 30, 60, 120].find((each) => shown / each <= 6);
  for (let ago = 0; ago <= shown; ago += step) {
    const at = x(now - ago), anchor = ago ? "middle" : "end";
    parts.push(drawing("line", { x1: at, x2: at, y1: 0, y2: height }));
    if (at - label < 20 && ago) continue;
    parts.push(drawing("text", { x: at, y: height + 14, "text-anchor": anchor }, ago ? `-${span(ago)}` : "now"));
  }
  rows.forEach((name, index) => {
    const short = name.length > 20 ? `${name.slice(0, 19)}…` : name;
    parts.push(drawing("text", { x: 0, y: index * row + 13 }, short, drawing("title", {}, name)));
    for (const { kind, from, to } of history.workers.get(name)) {
      if (to < now - shown) continue;
      const at = { x: x(from), y: index * row + 2, width: Math.max(1, x(to) - x(from)), height: row - 4 };
      parts.push(drawing("rect", { class: kind, ...at }));
    }
  });
  const left = names.length - rows.length;
  if (left > 0) parts.push(drawing("text", { x: 0, y: height + 14 }, `and ${left} more`));
  svg.setAttribute("height", height + 20);
  svg.replaceChildren(...parts);
}

// ---- polling -----------------------------------------------------------------------------------------------------

let wake = () => {};

function notice(words) {
  $("notice").textContent = words;
  $("notice").hidden = !words;
}

function needsKey(words) {
  $("access").hidden = false;
  notice(sessionStorage.getItem(KEY) ? words : "");
}

async function watch() {
  const history = new RoleHistory();
  let before = null, silent = 0;
  for (;;) {
    let next = sleep(Math.min(SLOWEST_MS, POLL_MS * 2 ** Math.min(silent, 8)));
    if (document.hidden) next = new Promise((done) => { wake = done; });
    else {
      try {
        const status = await (await ask("ui/status", { signal: AbortSignal.timeout(ANSWER_MS) })).json();
        const now = performance.now() / 1000;
        history.add(status.workers, now);
        showStatus(status, tokenRate(before, status));
        drawRoles(history, now);
        [before, silent] = [status, 0];
        $("access").hidden = true;
        notice("");
      } catch (error) {
        if (error.status === 401) {
          next = new Promise((done) => { wake = done; });
          needsKey(error.message);
        } else {
          silent += 1;
          notice(`No answer from the gateway; trying again. ${error.message}`);
        }
      }
    }
    await next;
  }
}

document.addEventListener("visibilitychange", () => document.hidden || wake());
$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  wake();
});

// ---- chat --------------------------------------------------------------------------------------------------------

const conversation = [];
let running = null;

function bubble(kind, content) {
  const made = element("div", { class: `message ${kind}` }, content);
  $("messages").append(made);
  $("messages").scrollTop = $("messages").scrollHeight;
  return made;
}

/** Streams one answer into its bubble, and returns its text. */
async function answer(signal) {
  const body = { messages: conversation, stream: true, stream_options: { include_usage: true } };
  if (!$("model").hidden) body.model = $("model").value;
  if ($("most").value) body.max_tokens = Number($("most").value);
  const began = performance.now();
  const headers = { "Content-Type": "application/json" };
  const response = await ask("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  const text = document.createTextNode(""), shown = bubble("assistant", text);
  const thought = element("div", { class: "reasoning" });
  let first = null, last = null, tokens = 0;
  try {
    for await (const data of dataOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      tokens = chunk.usage?.completion_tokens ?? tokens;
      const { content, reasoning_content: reasoning } = chunk.choices[0]?.delta ?? {};
      if (!content && !reasoning) continue;
      last = performance.now();
      first ??= last;
      if (reasoning) shown.prepend(thought);
      thought.append(reasoning ?? "");
      text.appendData(content ?? "");
      $("messages").scrollTop = $("messages").scrollHeight;
    }
  } finally {
    if (text.data) conversation.push({ role: "assistant", content: text.data });
  }
  if (first !== null) {
    const rate = tokens > 1 && last > first ? `, ${((tokens - 1) / (last - first) * 1000).toFixed(1)} tokens/s` : "";
    shown.append(element("small", {}, `first token after ${Math.round(first - began)} ms, ${tokens} tokens${rate}`));
  }
  return text.data;
}

function showRunning(runs) {
  $("send").hidden = $("clear").disabled = runs;
  $("stop").hidden = !runs;
}

async function send() {
  const words = $("prompt").value.trim();
  if (!words || running) return;
  running = new AbortController();
  showRunning(true);
  $("prompt").value = "";
  bubble("user", words);
  conversation.push({ role: "user", content: words });
  try {
    await answer(running.signal);
  } catch (error) {
    if (error.status === 401) needsKey(error.message);
    bubble("failed", error.name === "AbortError" ? "Stopped." : error.message);
  }
  if (conversation.at(-1).role === "user") conversation.pop(); // it has no answer
  running = null;
  showRunning(false);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  conversation.length = 0;
  $("messages").replaceChildren();
});

watch();
