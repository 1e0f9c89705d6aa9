// The live page of a dspark server: asks /live once a second, draws what it says, and chats over the OpenAI API.
// It must never put what a server says into the page as markup, nor talk to any host but the page's own.

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const LONGEST_WAIT_MS = 30_000;
const SPAN_MS = 120_000;
const GAP_MS = 4500;
const FEW = 20;
const UNKNOWN = "–";
const KEY = "dspark-api-key";

const SOURCES = new Map([
  ["drafted", { mark: "d", says: (by) => `drafted${by ? ` by ${by}` : ""}, accepted` }],
  ["corrected", { mark: "c", says: () => "corrected: the model's own token instead of a wrong guess" }],
  ["bonus", { mark: "b", says: () => "bonus: the model's own token after all guesses held" }],
  ["forced", { mark: "f", says: () => "forced: the only token that the grammar allowed" }],
  ["target", { mark: "t", says: () => "target: the model's own token, nothing was guessed" }],
]);

const $ = (id) => document.getElementById(id);

// ---------------------------------------------------------------------------------------------- text and numbers

function number(value, digits = 0, unit = "") {
  if (!Number.isFinite(value)) return UNKNOWN;
  const format = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return value.toLocaleString("en", format) + unit;
}

const rate = (value) => number(value, value > 0 && value < 100 ? 1 : 0);
const inTokens = (count) => `${number(count)} ${count === 1 ? "token" : "tokens"}`;
const percent = (value) => (value === null ? UNKNOWN : number(100 * value, 0, "%"));
const ratio = (part, whole) => (whole > 0 ? part / whole : null);

// In full until it no longer fits its place.
function count(value, most = 1e6) {
  if (!(value >= most)) return number(value);
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return UNKNOWN;
  const minutes = Math.floor(seconds / 60);
  const hours = Math.floor(minutes / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (hours < 1) return `${minutes} min`;
  return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// Untouched text keeps a reader's selection and does not wake assistive technology.
function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function make(tag, { name = "", text = "" } = {}) {
  const node = document.createElement(tag);
  if (name) node.className = name;
  if (text) node.textContent = text;
  return node;
}

function announce(text) {
  $("announcer").textContent = text;
}

// ---------------------------------------------------------------------------------------------- the server

// Addresses are relative, so that the page also works behind a proxy that gives it a folder.
async function call(address, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(address, { ...options, headers, cache: "no-store" });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const said = body?.error?.message ?? body?.detail;
  const message = typeof said === "string" && said ? said : `The server answered with status ${response.status}.`;
  return Object.assign(new Error(message), { status: response.status });
}

// ---------------------------------------------------------------------------------------------- polling

// `asking`: the form for the key is shown; `locked`: without a key there is nothing to poll for.
const link = { timer: 0, busy: false, asking: false, locked: false, failures: 0, seen: 0, model: "" };

async function poll() {
  clearTimeout(link.timer);
  if (document.hidden || link.busy || link.locked) return;
  link.busy = true;
  let live = null;
  try {
    live = await (await call("live", { signal: AbortSignal.timeout(TIMEOUT_MS) })).json();
  } catch (error) {
    lost(error);
  }
  link.busy = false;
  if (live) found(live);
  if (!link.locked) link.timer = setTimeout(poll, pause());
}

const pause = () => Math.min(POLL_MS * 2 ** link.failures, LONGEST_WAIT_MS);

function found(live) {
  if (link.failures) announce("The server answers again.");
  Object.assign(link, { failures: 0, seen: Date.now(), model: live.model });
  document.body.dataset.link = "up";
  if (!link.asking && $("key-form").contains(document.activeElement)) $("message").focus();
  showInSlot(link.asking ? "key-form" : "facts");
  draw(live);
}

function lost(error) {
  if (error.status === 401) return lock();
  if (!link.failures) announce("The server is unreachable.");
  link.failures += 1;
  document.body.dataset.link = "lost";
  setState("lost", "Unreachable");
  const figures = link.seen ? ` Figures are from ${new Date(link.seen).toLocaleTimeString("en-GB")}.` : "";
  const cause = error.status ? `Server unreachable (status ${error.status}).` : "Server unreachable.";
  setText($("trouble-text"), `${cause} Next try in ${Math.round(pause() / 1000)} s.${figures}`);
  showInSlot("trouble");
}

function setState(state, label) {
  $("state").dataset.state = state;
  setText($("state"), label);
}

function showInSlot(id) {
  for (const child of document.querySelector(".slot").children) child.hidden = child.id !== id;
}

// ---------------------------------------------------------------------------------------------- the key

function lock() {
  link.locked = true;
  document.body.dataset.link = "lost";
  setState("locked", "Key needed");
  askForKey();
}

function askForKey() {
  const refused = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  if (link.asking) return;
  link.asking = true;
  const text = refused ? "The server refused this API key." : "This server asks for an API key.";
  setText($("key-text"), text);
  showInSlot("key-form");
  announce(text);
  if (document.activeElement === document.body) $("key").focus();
}

function useKey(event) {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  Object.assign(link, { asking: false, locked: false });
  poll();
}

// ---------------------------------------------------------------------------------------------- drawing

function draw(live) {
  document.title = `${live.model} · dspark`;
  drawHeader(live);
  drawSpeed(live);
  drawRunning(live);
  drawPositions(live.acceptance.by_position);
  for (const kind of ["class", "drafter", "grammar"]) drawGroups(kind, live.acceptance[`by_${kind}`]);
}

function drawHeader({ model, version, uptime_seconds, draining, speculation, requests }) {
  setText($("model"), model);
  $("model").title = model;
  const { method, model: drafter, policy, num_speculative_tokens: most } = speculation;
  const plain = !method || method === "none";
  setText($("drafts"), plain ? "nothing (plain decoding)" : drafter ? `${method} (${drafter})` : method);
  setText($("policy"), plain ? UNKNOWN : `${policy}, up to ${most} tokens`);
  setText($("uptime"), duration(uptime_seconds));
  setText($("version"), version);
  if (draining) setState("draining", "Draining");
  else if (requests.running + requests.waiting) setState("serving", "Serving");
  else setState("idle", "Idle");
}

function drawSpeed({ speed, requests, kv_cache_usage, totals }) {
  setText($("speed-now"), rate(speed.tokens_per_second));
  setText($("speed-plain"), rate(speed.plain_tokens_per_second));
  setText($("speedup"), number(speed.speedup, 2, "×"));
  $("speedup").dataset.gain = speed.speedup > 1.005 ? "yes" : "no";
  setText($("saved"), savedText(totals.seconds_saved));
  setText($("running"), `${number(requests.running)} of ${number(requests.max_running)}`);
  setText($("waiting"), number(requests.waiting));
  setText($("cache"), percent(kv_cache_usage));
  setText($("generated"), count(totals.generation_tokens));
  setText($("prompted"), count(totals.prompt_tokens));
  setText($("guesses"), guessesText(totals));
  remember(speed);
  drawChart();
}

function savedText(seconds) {
  if (!Number.isFinite(seconds)) return "";
  const amount = Math.abs(seconds) < 60 ? number(Math.abs(seconds), 1, " s") : duration(Math.abs(seconds));
  return seconds < 0 ? `${amount} lost so far` : `${amount} saved so far`;
}

function guessesText({ verified, accepted }) {
  return verified > 0 ? `${percent(accepted / verified)} of ${count(verified)}` : UNKNOWN;
}

// ---------------------------------------------------------------------------------------------- the chart

let samples = [];

function remember(speed) {
  const at = Date.now();
  samples.push({ at, now: speed.tokens_per_second, plain: speed.plain_tokens_per_second });
  samples = samples.filter((sample) => at - sample.at <= SPAN_MS + GAP_MS);
}

function drawChart() {
  const end = Date.now();
  const values = samples.flatMap(({ now, plain }) => [now, plain]).filter(Number.isFinite);
  const top = roundUp(Math.max(...values));
  const place = (field) => ({ at, [field]: value }) => [600 * (1 - (end - at) / SPAN_MS), 100 * (1 - value / top)];
  const [now, plain] = ["now", "plain"].map((field) => segments(field).map((run) => run.map(place(field))));
  $("chart-now").setAttribute("d", now.map(line).join(""));
  $("chart-plain").setAttribute("d", plain.map(line).join(""));
  $("chart-area").setAttribute("d", now.map(area).join(""));
  setText($("chart-top"), number(top));
  setText($("chart-middle"), number(top / 2));
  setText($("chart-text"), chartText());
}

// Few steps, so that the axis changes seldom, each with a half that is round too.
function roundUp(value) {
  const floor = Math.max(value * 1.05, 10);
  const power = 10 ** Math.floor(Math.log10(floor));
  return [1, 2, 4, 6, 8, 10].map((factor) => factor * power).find((top) => top >= floor);
}

// A line across seconds in which nobody looked would show figures that nobody has.
function segments(field) {
  const runs = [];
  let last = -Infinity;
  for (const sample of samples) {
    if (!Number.isFinite(sample[field])) last = -Infinity;
    else {
      if (sample.at - last > GAP_MS) runs.push([]);
      runs.at(-1).push(sample);
      last = sample.at;
    }
  }
  return runs;
}

const points = (run) => run.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");
const line = (run) => `M${points(run.length > 1 ? run : [run[0], run[0]])}`;
const area = (run) => `M${run[0][0].toFixed(1)} 100L${points(run)}L${run.at(-1)[0].toFixed(1)} 100Z`;

function chartText() {
  const about = (field) => {
    const values = samples.map((sample) => sample[field]).filter(Number.isFinite);
    if (!values.length) return "not known";
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    return `latest ${rate(values.at(-1))}, mean ${rate(mean)}, highest ${rate(Math.max(...values))}`;
  };
  return `Tokens per second: ${about("now")}. Without speculation, estimated: ${about("plain")}.`;
}

// ---------------------------------------------------------------------------------------------- tables and bars

// Rows are reused, so that a table does not lose selection and scroll place once a second.
function fill(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, index) => fillRow(body.rows[index] ?? body.insertRow(), cells));
}

function fillRow(row, cells) {
  while (row.cells.length < cells.length) row.append(headOrCell(row));
  cells.forEach((text, index) => setText(row.cells[index], text));
}

function headOrCell(row) {
  if (row.cells.length) return make("td");
  const head = make("th");
  head.scope = "row";
  return head;
}

function drawRunning({ running, requests }) {
  const { max_running: most, waiting } = requests;
  setText($("running-hint"), waiting ? `${number(waiting)} waiting` : `room for ${number(most)}`);
  $("running-table").hidden = !running.length;
  $("running-empty").hidden = running.length > 0;
  fill($("running-rows"), running.map(runningCells));
  running.forEach(({ id }, index) => {
    const row = $("running-rows").rows[index];
    row.cells[0].title = id;
    row.toggleAttribute("data-own", id === chat.id);
  });
}

function runningCells(request) {
  return [
    request.id === chat.id ? "this chat" : request.id,
    request.class || "none",
    number(request.seconds, 1),
    number(request.prompt_tokens),
    number(request.tokens),
    rate(request.tokens_per_second),
    number(request.mean_acceptance_length, 2),
  ];
}

function drawGroups(kind, groups) {
  const body = $(`${kind}-rows`);
  const empty = body.rows[0]?.cells[0].colSpan > 1;
  if (!groups.length) return empty ? undefined : drawNone(body);
  if (empty) body.deleteRow(0);
  fill(body, groups.map(groupCells));
  groups.forEach((group, index) => {
    const [name, , share] = body.rows[index].cells;
    name.title = group.name;
    share.className = "share";
    share.style.setProperty("--share", String(ratio(group.accepted, group.verified) ?? 0));
  });
}

function drawNone(body) {
  fill(body, []);
  const cell = body.insertRow().insertCell();
  cell.className = "none";
  cell.colSpan = 6;
  cell.textContent = "Nothing yet.";
}

function groupCells({ name, steps, emitted, verified, accepted }) {
  return [
    name || "none",
    number(ratio(emitted, steps), 2),
    percent(ratio(accepted, verified)),
    [accepted, verified].map((value) => count(value, 1e5)).join(" / "),
    count(emitted, 1e5),
    count(steps, 1e5),
  ];
}

function drawPositions(positions) {
  $("bars").hidden = !positions.length;
  $("bars-empty").hidden = positions.length > 0;
  const bars = $("bars");
  while (bars.children.length > positions.length) bars.lastChild.remove();
  positions.forEach((entry, index) => drawBar(bars.children[index] ?? newBar(bars), entry));
  fill($("position-rows"), positions.map((entry) => positionCells(entry, positions[0].verified)));
}

function newBar(bars) {
  const item = make("li");
  const room = make("span", { name: "room" });
  room.append(make("span", { name: "value" }), make("span", { name: "bar" }));
  const place = make("span", { name: "position" });
  for (const drawn of [room, place]) drawn.setAttribute("aria-hidden", "true");
  item.append(room, place, make("span", { name: "sr" }));
  bars.append(item);
  return item;
}

function drawBar(item, { position, verified, accepted }) {
  const [room, place, spoken] = item.children;
  const [value, bar] = room.children;
  const share = ratio(accepted, verified);
  const counts = `${number(accepted)} of ${number(verified)} checked guesses accepted`;
  setText(value, percent(share));
  setText(place, String(position + 1));
  setText(spoken, `Position ${position + 1}: ${percent(share)}, ${counts}`);
  item.title = `Position ${position + 1}: ${counts}`;
  item.toggleAttribute("data-few", verified < FEW);
  bar.style.setProperty("--share", String(share ?? 0));
}

function positionCells({ position, verified, accepted }, first) {
  const shares = [ratio(accepted, verified), ratio(accepted, first)].map(percent);
  return [String(position + 1), number(verified), number(accepted), ...shares];
}

// ---------------------------------------------------------------------------------------------- server-sent events

// A CR at the end of a piece may be the first half of a CRLF, so it waits for the next piece.
function takeLines(text, ended) {
  const safe = !ended && text.endsWith("\r") ? text.slice(0, -1) : text;
  const lines = safe.split(/\r\n|\n|\r/);
  const rest = lines.pop() + text.slice(safe.length);
  return ended ? { lines: [...lines, rest, ""], rest: "" } : { lines, rest };
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (let ended = false; !ended; ) {
      const { value = "", done } = await reader.read();
      const taken = takeLines(rest + value, done);
      for (const text of taken.lines) {
        if (text.startsWith("data:")) data.push(text.slice(text[5] === " " ? 6 : 5));
        else if (text === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      rest = taken.rest;
      ended = done;
    }
  } finally {
    // Whoever stops listening early lets go of the connection too.
    reader.cancel().catch(() => {});
  }
}

// ---------------------------------------------------------------------------------------------- an answer

// One answer on the page: takes chunks, shows tokens by their source, and says at the end how it went.
class Answer {
  constructor(model, options) {
    Object.assign(this, { options, text: "", tokens: 0, counts: new Map(), usage: null, metrics: null });
    Object.assign(this, { finish: null, started: performance.now(), first: null, pending: [] });
    this.words = make("p", { name: "words" });
    this.words.dataset.busy = "";
    this.summary = make("p", { name: "summary", text: "Waiting for the first token." });
    this.node = turn(model || "Answer", this.words, this.summary);
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message ?? "The server reported an error.");
    this.usage = chunk.usage ?? this.usage;
    this.metrics = chunk.metrics ?? this.metrics;
    chat.id = chunk.id ?? chat.id;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    this.add(choice.delta?.content ?? "", choice.token_sources ?? []);
  }

  // The content is the answer; sources that do not add up to it may not change what is read.
  add(content, sources) {
    const agrees = sources.map(({ text }) => text).join("") === content;
    const pieces = agrees ? sources : [{ text: content, source: null }];
    if (!pieces.length || (!agrees && !content)) return;
    this.first ??= performance.now();
    this.text += content;
    for (const piece of pieces) this.count(piece);
    if (!this.pending.length) requestAnimationFrame(() => this.flush());
    this.pending.push(...pieces);
  }

  count({ source }) {
    this.tokens += 1;
    if (SOURCES.has(source)) this.counts.set(source, (this.counts.get(source) ?? 0) + 1);
  }

  // Once a frame, not once a chunk: at hundreds of tokens a second the page would take the time of the server.
  flush() {
    const pieces = this.pending.splice(0);
    if (!pieces.length) return;
    keepAtEnd(() => {
      this.words.append(...pieces.filter(({ text }) => text).map(tokenNode));
      setText(this.summary, inTokens(this.tokens));
    });
  }

  end(problem) {
    this.flush();
    delete this.words.dataset.busy;
    keepAtEnd(() => {
      this.words.hidden = !this.text;
      this.summary.replaceChildren(...this.parts(problem));
      this.summary.hidden = !this.summary.hasChildNodes();
      if (this.counts.size) this.node.append(this.bar());
      if (problem?.error) this.node.append(make("p", { name: "error", text: `Error: ${problem.error}` }));
    });
    this.say(problem);
  }

  parts(problem) {
    const facts = [...this.facts(), ...this.shares(), ...this.remarks(problem)];
    return facts.flatMap((text, index) => [index ? " · " : "", make("span", { name: "part", text })]);
  }

  facts() {
    const seconds = (performance.now() - this.started) / 1000;
    const tokens = this.usage?.completion_tokens ?? this.tokens;
    const length = this.metrics?.speculative_decoding?.mean_acceptance_length;
    if (this.first === null) return [];
    return [
      inTokens(tokens),
      `${number(seconds, 2)} s`,
      `${rate(tokens / seconds)} tokens/s`,
      `first token after ${number((this.first - this.started) / 1000, 2)} s`,
      ...(Number.isFinite(length) ? [`accepted length ${number(length, 2)}`] : []),
    ];
  }

  shares() {
    return this.order().map((source) => `${source} ${percent(this.counts.get(source) / this.tokens)}`);
  }

  order() {
    return [...SOURCES.keys()].filter((source) => this.counts.has(source));
  }

  remarks(problem) {
    const said = [];
    if (!this.options.speculate) said.push("speculation off");
    if (problem?.stopped) said.push("stopped");
    if (this.finish === "length") said.push("ended at max tokens");
    if (!this.text && !problem) said.push("empty answer");
    return said;
  }

  bar() {
    const bar = make("div", { name: "shares" });
    bar.setAttribute("aria-hidden", "true");
    for (const source of this.order()) {
      const part = make("span", { name: source });
      part.style.flexGrow = String(this.counts.get(source));
      bar.append(part);
    }
    return bar;
  }

  say(problem) {
    if (!this.node.isConnected) return;
    if (problem?.error) announce(`Error: ${problem.error}`);
    else announce(`${problem?.stopped ? "Stopped" : "Answer"}: ${this.text} ${this.summary.textContent}`);
  }
}

function tokenNode({ text, source, drafter }) {
  const known = SOURCES.get(source);
  if (!known) return document.createTextNode(text);
  const node = make("span", { name: `token ${source}`, text });
  node.title = known.says(drafter);
  node.dataset.mark = known.mark;
  return node;
}

function turn(who, ...content) {
  const item = make("li", { name: "turn" });
  item.append(make("h3", { name: "who", text: who }), ...content);
  return item;
}

// Who has scrolled up to read is left there.
function keepAtEnd(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// ---------------------------------------------------------------------------------------------- the chat

const chat = { messages: [], abort: null, id: null };

async function send(event) {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || chat.abort) return;
  const messages = chat.messages;
  const options = readOptions();
  messages.push({ role: "user", content: text });
  $("message").value = "";
  const answer = openTurn(text, options);
  setBusy(new AbortController());
  const problem = await converse(answer, messages, options, chat.abort.signal);
  setBusy(null);
  answer.end(problem);
  conclude(answer, messages, text);
}

// An answer that never began is no part of the conversation, and its question goes back to be sent again.
function conclude(answer, messages, text) {
  if (answer.text) return messages.push({ role: "assistant", content: answer.text });
  messages.pop();
  const cleared = messages !== chat.messages;
  if (!answer.finish && !cleared && !$("message").value) $("message").value = text;
}

async function converse(answer, messages, options, signal) {
  try {
    const response = await call("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody(messages, options)),
      signal,
    });
    await receive(answer, response.body);
    return null;
  } catch (error) {
    if (signal.aborted) return { stopped: true };
    if (error.status === 401) askForKey();
    return { error: error.message };
  }
}

async function receive(answer, body) {
  for await (const text of events(body)) {
    if (text === "[DONE]") return;
    answer.take(parsed(text));
  }
  throw new Error("The connection ended before the answer did.");
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error("The server sent an event that is not JSON.");
  }
}

function readOptions() {
  return {
    maxTokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    speculate: $("speculate").checked,
    json: $("json").checked,
  };
}

function requestBody(messages, { maxTokens, temperature, speculate, json }) {
  return {
    model: link.model,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: maxTokens,
    temperature,
    token_sources: true,
    include_metrics: true,
    ...(speculate ? {} : { speculation: false }),
    ...(json ? { response_format: { type: "json_object" } } : {}),
  };
}

function openTurn(text, options) {
  const answer = new Answer(link.model, options);
  $("chat-empty").hidden = true;
  $("turns").append(turn("You", make("p", { name: "words", text })), answer.node);
  $("log").scrollTop = $("log").scrollHeight;
  announce("Sent. Waiting for the answer.");
  return answer;
}

// A button that is disabled under the focus would drop the keyboard's place.
function setBusy(abort) {
  chat.abort = abort;
  if (!abort) chat.id = null;
  const leaving = abort ? $("send") : $("stop");
  if (document.activeElement === leaving) $("message").focus();
  $("send").disabled = Boolean(abort);
  $("stop").disabled = !abort;
}

function clearChat() {
  chat.abort?.abort();
  chat.messages = [];
  $("turns").replaceChildren();
  $("chat-empty").hidden = false;
  announce("Conversation cleared.");
  $("message").focus();
}

function onMessageKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat-form").requestSubmit();
}

function onKey(event) {
  if (event.key === "Escape" && !event.isComposing) chat.abort?.abort();
}

// ---------------------------------------------------------------------------------------------- start

function bindView(box, name) {
  const apply = () => document.querySelector(".chat").toggleAttribute(`data-${name}`, $(box).checked);
  $(box).addEventListener("change", apply);
  apply();
}

function start() {
  $("chat-form").addEventListener("submit", send);
  $("message").addEventListener("keydown", onMessageKey);
  $("stop").addEventListener("click", () => chat.abort?.abort());
  $("clear").addEventListener("click", clearChat);
  $("key-form").addEventListener("submit", useKey);
  $("retry").addEventListener("click", poll);
  document.addEventListener("keydown", onKey);
  document.addEventListener("visibilitychange", poll);
  bindView("colours", "colours");
  bindView("marks", "marks");
  for (const kind of ["class", "drafter", "grammar"]) drawNone($(`${kind}-rows`));
  poll();
}

start();
