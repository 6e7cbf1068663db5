"use strict";

const HISTORY = 120;
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const history = { speed: [], running: [], waiting: [], tau: [] };
let before = null;
let flight = null;

function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

function html(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function short(value, digits = 1) {
  return value === null || value === undefined || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const ms = (seconds) => (seconds === null ? "–" : `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`);

function duration(seconds) {
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
}

// -- numbers ---------------------------------------------------------------------------------------------------------

function health(state) {
  $("health").textContent = state;
  $("health").dataset.state = state === "ok" ? "ok" : "bad";
}

async function poll() {
  try {
    const answer = await fetch("stats", { cache: "no-store" });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
  } catch (error) {
    health("no connection");
  }
}

function show(data) {
  health(data.engine ? data.health : "dead");
  $("model").textContent = data.model;
  $("version").textContent = data.version;
  $("uptime").textContent = duration(data.uptime);
  if (!data.engine) return;
  const engine = data.engine;
  const count = (name) => engine.counters[name] || 0;
  const now = {
    at: performance.now(), tokens: count("output_tokens"), rounds: engine.spec.rounds, roundTokens: engine.round_tokens,
    busy: engine.busy_seconds, idle: engine.idle_seconds,
  };
  const last = before || now;
  before = now;
  const seconds = (now.at - last.at) / 1e3;
  const speed = seconds > 0 ? (now.tokens - last.tokens) / seconds : 0;
  const rounds = now.rounds - last.rounds;
  const tau = rounds > 0 ? (now.roundTokens - last.roundTokens) / rounds : null;
  const worked = now.busy - last.busy + now.idle - last.idle;
  remember("speed", speed);
  remember("running", engine.running);
  remember("waiting", engine.waiting);
  remember("tau", tau);
  tiles([
    ["tokens/s", short(speed)],
    ["running", engine.running],
    ["waiting", engine.waiting],
    ["τ since the start", short(engine.spec.acceptance_length, 2)],
    ["drafts accepted", percent(engine.spec.accepted, engine.spec.drafted)],
    ["prompt from cache", percent(count("cached_prompt_tokens"), count("prompt_tokens"))],
    ["pages in use", percent(engine.pools.pages - engine.pools.pages_free - engine.pools.pages_cached, engine.pools.pages)],
    ["pages cached", percent(engine.pools.pages_cached, engine.pools.pages)],
    ["first token, mean", ms(data.answers.mean_ttft)],
    ["per token, mean", ms(data.answers.mean_tpot)],
    ["device idle, last second", percent(now.idle - last.idle, worked)],
    ["preempted", count("preemptions")],
  ]);
  line("speed", [history.speed]);
  line("batch", [history.running, history.waiting]);
  line("tau", [history.tau]);
  $("speed-now").textContent = short(speed);
  $("batch-now").textContent = `${engine.running} + ${engine.waiting}`;
  $("tau-now").textContent = short(tau, 2);
  positions(engine.spec);
  drafts(data.num_drafts);
  if (!$("hold").checked) frames(engine.timeline || []);
}

function remember(name, value) {
  history[name].push(value);
  if (history[name].length > HISTORY) history[name].shift();
}

function tiles(pairs) {
  const list = $("tiles");
  if (list.children.length !== pairs.length) {
    list.replaceChildren(...pairs.map(([name]) => {
      const tile = html("div");
      tile.append(html("dt", name), html("dd"));
      return tile;
    }));
  }
  pairs.forEach(([, value], i) => { list.children[i].lastChild.textContent = value; });
}

function line(id, series) {
  const svg = $(id);
  const top = Math.max(1e-9, ...series.flat().filter((v) => v !== null));
  svg.setAttribute("viewBox", `0 0 ${HISTORY - 1} 100`);
  svg.setAttribute("preserveAspectRatio", "none");
  const lines = series.map((values) => {
    const start = HISTORY - values.length;
    const points = values.map((v, i) => (v === null ? null : `${start + i},${98 - (94 * v) / top}`));
    return make("polyline", { points: points.filter((p) => p !== null).join(" ") });
  });
  svg.replaceChildren(make("line", { x1: 0, x2: HISTORY - 1, y1: 98, y2: 98 }), ...lines);
}

function positions(spec) {
  const held = spec.accepted_per_position;
  const rows = spec.drafted_per_position.map((seen, i) => {
    const row = html("div");
    const meter = html("meter");
    meter.max = 1;
    meter.value = seen ? (held[i] || 0) / seen : 0;
    meter.setAttribute("aria-label", `draft ${i + 1}`);
    row.append(html("span", `draft ${i + 1}`), meter, html("span", `${percent(held[i] || 0, seen)} of ${seen}`));
    return row;
  });
  $("positions").replaceChildren(...(rows.length ? rows : [html("p", "No drafts yet.", "note")]));
}

function drafts(most) {
  const list = $("drafts");
  for (let k = list.options.length - 1; k <= most; k += 1) list.append(new Option(`at most ${k}`, k));
}

// -- the timeline ----------------------------------------------------------------------------------------------------

function lastRun(rows, most) {
  // Launches before a pause without requests would squeeze the rest into nothing.
  const shown = rows.slice(-most);
  const lengths = shown.map((r) => r.device[1] - r.device[0]).sort((a, b) => a - b);
  const usual = lengths.length ? lengths[Math.floor(lengths.length / 2)] : 0;
  let first = 0;
  for (let i = 1; i < shown.length; i += 1) {
    if (shown[i].plan[0] - shown[i - 1].collect[1] > Math.max(20 * usual, 5)) first = i;
  }
  return shown.slice(first);
}

function frames(rows) {
  const most = Number(document.querySelector("input[name=launches]:checked").value);
  const shown = lastRun(rows, most);
  const svg = $("frames");
  if (!shown.length) {
    svg.replaceChildren();
    return;
  }
  const begin = shown[0].plan[0];
  const end = Math.max(...shown.map((r) => r.collect[1]));
  const width = Math.max(320, svg.clientWidth || 320);
  const left = 52;
  const x = (t) => left + ((width - left - 6) * (t - begin)) / (end - begin || 1);
  svg.setAttribute("viewBox", `0 0 ${width} 112`);
  const parts = [make("text", { x: 4, y: 32 }, "host"), make("text", { x: 4, y: 74 }, "device")];
  const block = (name, [from, to], y, height) => {
    const rect = make("rect", { class: name, x: x(from), width: Math.max(0.6, x(to) - x(from)), y, height });
    rect.append(make("title", {}, `${name}: ${(to - from).toFixed(3)} ms`));
    parts.push(rect);
  };
  let busy = 0;
  let idle = 0;
  shown.forEach((r, i) => {
    block("wait", r.wait, 16, 26);
    for (const name of ["launch", "plan", "collect"]) block(name, r[name], 16, 26);
    block("device", r.device, 58, 26);
    busy += r.device[1] - r.device[0];
    const gap = i ? r.device[0] - shown[i - 1].device[1] : 0;
    if (gap > 0) {
      idle += gap;
      block("idle", [shown[i - 1].device[1], r.device[0]], 67, 8);
    }
  });
  for (const share of [0, 0.5, 1]) {
    const at = begin + share * (end - begin);
    const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle";
    parts.push(make("text", { x: x(at), y: 104, "text-anchor": anchor }, `${(at - begin).toFixed(2)} ms`));
  }
  svg.replaceChildren(...parts);
  const tokens = shown.reduce((sum, r) => sum + r.emitted, 0);
  $("frames-text").textContent =
    `${shown.length} launches, ${tokens} tokens in ${(end - begin).toFixed(2)} ms: the device was busy ` +
    `${percent(busy, busy + idle)} and idle ${percent(idle, busy + idle)} of the time between them, by the host's clock.`;
  $("rows").replaceChildren(...shown.map((r, i) => {
    const row = html("tr");
    const long = (name) => short(r[name][1] - r[name][0], 3);
    const gap = i ? Math.max(0, r.device[0] - shown[i - 1].device[1]) : 0;
    const cells = [r.slots, r.rows, r.prefill_rows, r.emitted, long("plan"), long("launch"), long("device"),
      short(gap, 3), long("wait"), long("collect")];
    row.append(...cells.map((cell) => html("td", cell)));
    return row;
  }));
}

// -- the playground --------------------------------------------------------------------------------------------------

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const pieces = text.split("\n\n");
    text = pieces.pop();
    for (const piece of pieces) {
      if (piece.startsWith("data: ") && piece !== "data: [DONE]") yield JSON.parse(piece.slice(6));
    }
  }
}

function request() {
  const body = {
    stream: true, stream_options: { include_usage: true }, return_token_ids: true,
    max_tokens: Number($("tokens").value), temperature: Number($("temperature").value),
  };
  const limit = $("drafts").value;
  if (limit) body.speculative = limit === "off" ? "off" : Number(limit);
  if ($("raw").checked) return ["v1/completions", { ...body, prompt: $("prompt").value }];
  return ["v1/chat/completions", { ...body, messages: [{ role: "user", content: $("prompt").value }] }];
}

function append(choice) {
  const texts = choice.token_texts || [];
  const accepted = choice.accepted_tokens || 0;
  for (const [part, name] of [[texts.slice(0, accepted), "accepted"], [texts.slice(accepted), "own"]]) {
    const text = part.join("");
    if (text) $("answer").append(html("span", text, name));
  }
  $("answer").scrollTop = $("answer").scrollHeight;
}

function summary(usage, seconds, first) {
  const spec = usage.speculative;
  const rate = seconds > first ? (usage.completion_tokens - 1) / (seconds - first) : 0;
  return `${usage.completion_tokens} tokens, ${spec.accepted} of ${spec.drafted} drafts accepted, τ ` +
    `${short(spec.acceptance_length, 2)}; first token after ${ms(first)}, then ${short(rate)} tokens/s`;
}

async function send() {
  if (flight || !$("ask").reportValidity()) return;
  flight = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  $("answer").replaceChildren();
  $("answer-text").textContent = "waiting for the first token";
  const began = performance.now();
  let first = null;
  try {
    const [path, body] = request();
    const answer = await fetch(path, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: flight.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      if (event.choices.length && event.choices[0].token_ids) {
        if (first === null) first = (performance.now() - began) / 1e3;
        append(event.choices[0]);
        $("answer-text").textContent = "answering";
      }
      if (event.usage) $("answer-text").textContent = summary(event.usage, (performance.now() - began) / 1e3, first);
    }
  } catch (error) {
    $("answer-text").textContent = error.name === "AbortError" ? "stopped" : `failed: ${error.message}`;
  }
  flight = null;
  $("send").disabled = false;
  $("stop").disabled = true;
}

const stop = () => flight && flight.abort();

$("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.key === "Enter" && event.ctrlKey && event.target === $("prompt")) send();
});
setInterval(() => { if (!document.hidden) poll(); }, 1000);
poll();
