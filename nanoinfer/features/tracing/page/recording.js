// Part 1 of the page's script: the events, small helpers, and events -> run: steps, requests, sequences.

// The engine's events, in order. nanoinfer/features/tracing/events.py documents every event and field.
const EVENTS = /* EVENTS */ [];
// Beside another run (viewer.py): for each sequence, the positions at which the other has another token, and its text.
const DIFFERENCES = /* DIFFERENCES */ null;

// ---- small helpers
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const newest = list => list[list.length - 1];
const sum = numbers => numbers.reduce((a, b) => a + b, 0);
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const duration = s => (s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 2 : 1)} ms` : `${s.toFixed(1)} s`);
const percent = p => (p === 0 ? "0%" : p < 0.0001 ? "<0.01%" : `${(p * 100).toFixed(p < 0.1 ? 2 : 1)}%`);

const SIGNS = { " ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥" };
const signOf = char => SIGNS[char] ?? "␦"; // other control characters
const visibleText = (text, id) => text.replace(/[\s\p{Cc}]/gu, signOf) || `#${id}`;

/** A token's text as nodes. Invisible characters stay in the text, each behind its sign. An empty text becomes the id. */
function visible(text, id) {
  if (text === "") return [el("span.sign", {}, `#${id}`)];
  const parts = text.split(/([\s\p{Cc}])/u).filter(part => part !== "");
  return parts.map(part => (/^[\s\p{Cc}]$/u.test(part) ? el("span.sign", { "data-sign": signOf(part) }, part) : part));
}

const legend = (className, text, style = "") => el("span", {}, el("i", { className: `swatch ${className}`, style }), text);
const facts = pairs => el("dl.facts", {},
  ...Object.entries(pairs).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, `${value}`))));

// ---- events -> run: steps, requests, sequences
/**
 * The step that an event belongs to:
 * - The events of a step's launch are contiguous (TokensDrafted begins them anew): StepScheduled, BatchBuilt, StageApplied
 *   and TokenDrawn, then BlocksCached, BlocksReleased and BlocksForked. `pictureAt` is the index of the last of them. The block pool of a step
 *   is the result of all block events up to there: as the model saw it, forks included. Blocks freed after that show in the
 *   next step.
 * - TokenAppended events belong to the StepTimed that follows them. With async_scheduling the next step's launch may come
 *   between a step and its tokens.
 */
function readEvents(events) {
  const run = { engine: null, steps: [], pool: [] };
  for (const name of ["requests", "sequences", "stages", "draws"]) run[name] = new Map();
  const isOfLaunch = new Set(["BatchBuilt", "StageApplied", "TokenDrawn", "BlocksCached", "BlocksReleased", "BlocksForked"]);
  let isLaunching = false, untimed = []; // untimed: tokens whose step is not known yet
  events.forEach((event, at) => {
    const step = newest(run.steps), key = `${event.sequence_id} ${event.position}`;
    isLaunching = isLaunching && isOfLaunch.has(event.event);
    if (isLaunching) step.pictureAt = at;
    if (event.event.startsWith("Block") || event.event === "BatchBuilt") run.pool.push({ at, ...event });
    switch (event.event) {
      case "EngineStarted": run.engine = event; break;
      case "RequestAdded": addRequest(run, event); break;
      case "StepScheduled": addStep(run, event, at); isLaunching = true; break;
      case "TokensDrafted": addDrafts(step, event); isLaunching = true; break; // their blocks were allocated before
      case "BatchBuilt": if (isLaunching) addBatch(run, step, event); break; // beam search emits it too, without StepScheduled
      case "BlocksForked": if (isLaunching) sequenceOf(run, event.sequence_id).forkedAt = step.index; break;
      case "StageApplied": run.stages.set(key, [...(isFirst(event) ? [] : run.stages.get(key) ?? []), event]); break;
      case "TokenDrawn": run.draws.set(key, event); break;
      case "TokenAppended": untimed.push(event); break;
      case "StepTimed": addTimes(run, event, untimed); untimed = []; break;
      case "RequestFinished": endRequest(run, event); break;
    }
  });
  run.rows = [...run.sequences.values()].sort((a, b) => a.request.order - b.request.order || a.answer - b.answer);
  run.rows.forEach((sequence, i) => { sequence.hue = Math.round(210 + i * 137.5) % 360; });
  return run;
}

/** Whether it is a row's first stage, the model's probabilities. (A user's stage may also be named model.) */
const isFirst = ({ stage, candidates }) => stage === "model" && candidates.every(({ before, after }) => before === after);

function addRequest(run, { request_id: id, prompt, prompt_token_ids: promptIds, tokens, params }) {
  run.requests.set(id, { id, prompt, promptIds, tokens, params, order: run.requests.size, addedAt: run.steps.length });
  sequenceOf(run, id);
}

/** The sequence of an id. "7.1" is the second answer to request "7". */
function sequenceOf(run, id) {
  if (!run.sequences.has(id)) {
    const [requestId, answer = 0] = id.split(".");
    const unknown = { id: requestId, prompt: "", promptIds: [], tokens: [], params: {}, order: -1, addedAt: 0 }; // not recorded
    run.sequences.set(id, {
      id, request: run.requests.get(requestId) ?? unknown, answer: Number(answer), forkedAt: -1, last: null,
      runs: new Map(), tokens: [], byStep: new Map(), byPosition: new Map(), // runs: step index -> {num, start}
    });
  }
  return run.sequences.get(id);
}

function addStep(run, event, at) {
  const index = run.steps.length;
  const running = new Set(event.running), preempted = new Set(event.preempted);
  run.steps.push({ index, event, pictureAt: at, running, preempted, batch: null, drafts: new Map(), times: null });
  event.sequence_ids.forEach((id, i) => sequenceOf(run, id).runs.set(index, { num: event.num_new_tokens[i], start: 0 }));
}

/** Several ids of a sequence: guesses at its next tokens, each a row of its own in the batch. */
function addDrafts(step, event) {
  event.sequence_ids.forEach((id, i) => step.drafts.set(id, event.draft_token_ids[i]));
}

function addBatch(run, step, event) {
  step.batch = event;
  event.sequence_ids.forEach((id, i) => {
    if (isDraft(event, i)) return;
    sequenceOf(run, id).runs.get(step.index).start = event.positions[event.query_start_loc[i]];
  });
}

/** Whether a batch's row i is a draft token: the rows of a sequence follow one another, the newest token first. */
const isDraft = (batch, i) => i > 0 && batch.sequence_ids[i] === batch.sequence_ids[i - 1];

function addTimes(run, event, tokens) {
  const step = newest(run.steps.filter(step => step.event.step === event.step));
  if (!step) return; // scheduled before the recording began
  step.times = event;
  for (const appended of tokens) {
    const sequence = sequenceOf(run, appended.sequence_id), token = { ...appended, step };
    sequence.tokens.push(token);
    sequence.byStep.set(step, [...(sequence.byStep.get(step) ?? []), token]); // with accepted drafts a step gives several
    sequence.byPosition.set(token.position, token);
    if (token.finish_reason) sequence.last = { at: step.index, reason: token.finish_reason, why: token.stop_reason };
  }
}

/** For sequences that no token ended: aborted, or failed. */
function endRequest(run, event) {
  for (const sequence of run.sequences.values()) {
    const isOpen = sequence.request.id === event.request_id && !sequence.last;
    if (isOpen) sequence.last = { at: run.steps.length - 1, reason: event.finish_reasons[sequence.answer], why: null };
  }
}

const run = readEvents(EVENTS);
const BLOCK_SIZE = run.engine.block_size;
const PHASES = ["schedule", "build", "forward", "sample", "advance"];
const total = times => (times ? sum(PHASES.map(phase => times[phase])) : 0);

/** A step's times as one bar. */
function layers(times, direction) {
  let from = 0;
  const stops = PHASES.map(phase => `var(--${phase}) ${from}% ${(from += times[phase] / total(times) * 100)}%`);
  return `background:linear-gradient(${direction}, ${stops.join(", ")})`;
}

/** A sequence's token at a position, or null if it is not known. */
function tokenAt(sequence, position) {
  const { promptIds, tokens } = sequence.request;
  if (position < promptIds.length) return { id: promptIds[position], text: tokens[position] ?? "" };
  const token = sequence.byPosition.get(position);
  return token ? { id: token.token_id, text: token.token } : null;
}

/** A sequence's state in a step, for the timeline's cell. "" before it was added and after it ended. */
function kindAt(sequence, step) {
  const part = sequence.runs.get(step.index), isOver = sequence.last && step.index > sequence.last.at;
  if (part && isOver) return "dropped";
  if (part && step.drafts.has(sequence.id)) return "drafts";
  if (part) return part.num > 1 || part.start < sequence.request.promptIds.length ? "prefill" : "decode";
  if (step.preempted.has(sequence.id)) return "preempted";
  if (step.running.has(sequence.id)) return "holding";
  if (step.index === sequence.forkedAt) return "fork";
  return !isOver && step.index >= sequence.request.addedAt ? "waiting" : "";
}

const KINDS = {
  prefill: "prefill: the number of tokens of a prompt, or of a recomputation",
  decode: "decode: one token",
  drafts: "decode with drafts, +n: n were accepted. Hatched: the share that was rejected",
  waiting: "waiting",
  preempted: "P: preempted, its blocks were freed",
  fork: "F: forked, its first token is drawn from the first answer's row",
  holding: "holds blocks, not scheduled",
  dropped: "computed after its end, dropped (async_scheduling)",
};

/** A sequence's drafts in a step and the tokens drawn in it, one more than the accepted drafts. null without drafts. */
function draftOf(sequence, step) {
  const ids = step.drafts.get(sequence.id), drawn = sequence.byStep.get(step) ?? [];
  return ids ? { ids, drawn, numAccepted: Math.max(drawn.length - 1, 0) } : null;
}

/** The drafts of some steps as a fact, or no fact if there are none. */
function draftCounts(steps) {
  const drafts = steps.flatMap(step => [...step.drafts.keys()].map(id => draftOf(run.sequences.get(id), step)));
  const accepted = sum(drafts.map(draft => draft.numAccepted)), drafted = sum(drafts.map(draft => draft.ids.length));
  return drafted ? { drafts: `${accepted} of ${drafted} accepted` } : {};
}

/** The text of an id, if it is anywhere in the recording. A rejected draft has no event with its text. */
function textOf(id) {
  textOf.known ??= new Map([
    ...[...run.requests.values()].flatMap(({ promptIds, tokens }) => promptIds.map((one, i) => [one, tokens[i] ?? ""])),
    ...[...run.stages.values()].flat().flatMap(({ candidates }) => candidates.map(one => [one.token_id, one.token])),
    ...run.rows.flatMap(({ tokens }) => tokens.map(one => [one.token_id, one.token])),
  ]);
  return textOf.known.get(id) ?? "";
}

/** A sequence's name in its colour. */
const owner = (sequence, more = "") => el("span.owner", { style: `--hue:${sequence.hue}` }, sequence.id + more);
