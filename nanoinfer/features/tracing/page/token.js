// Part 4: the texts, and the selected token: why it is there, the sampler's stages, the draw.

// ---- text
const OPEN_AT_FIRST = 8; // requests
const MOST_PROMPT_TOKENS = 1000; // with an element each
const views = []; // of the requests

function drawText() {
  for (const request of run.requests.values()) {
    const params = Object.entries(request.params).map(([name, value]) => `${name}=${value}`).join(", ");
    const details = el("details", { open: request.order < OPEN_AT_FIRST }, el("summary", {},
      el("b", {}, `Request ${request.id} `), el("span.small.muted.mono", {}, params || "default parameters")));
    const view = drawRequest(request, details);
    views.push(view);
    details.addEventListener("toggle", () => showView(view));
    byId("requests").append(details);
  }
}

function drawRequest(request, details) {
  const prompt = request.promptIds.slice(0, MOST_PROMPT_TOKENS).map((id, position) =>
    el("span.token", { title: `id ${id}, position ${position}` }, ...visible(request.tokens[position] ?? "", id)));
  const answers = run.rows.filter(sequence => sequence.request === request).map(sequence => {
    const select = el("button.owner", { type: "button", style: `--hue:${sequence.hue}`, title: "Select" }, sequence.id);
    select.addEventListener("click", () => goTo(now.step.index, sequence));
    return { sequence, select, chips: sequence.tokens.map(token => drawChip(token, sequence)), tail: el("span.tail.small") };
  });
  const rest = el("span.muted", {}, request.tokens.slice(MOST_PROMPT_TOKENS).join(""));
  details.append(el("p.tokens", {}, ...breakable(prompt), rest));
  for (const { select, chips, tail } of answers) details.append(el("p.tokens", {}, select, " ", ...breakable(chips)), tail);
  return { details, prompt, answers };
}

/** Lines may be broken between words, in front of the sign of the space. */
const breakable = tokens =>
  tokens.flatMap(token => (token.firstChild.matches?.("[data-sign]") ? [el("wbr"), token] : [token]));

function drawChip(token, sequence) {
  const title = `id ${token.token_id}, position ${token.position}, step ${token.step.event.step}`;
  const chip = el("span.token.drawn-token", { role: "button", title }, ...visible(token.token, token.token_id));
  const draft = draftOf(sequence, token.step);
  chip.classList.toggle("accepted", Boolean(draft) && draft.drawn.indexOf(token) < draft.numAccepted);
  chip.classList.toggle("differs", otherText(token) !== undefined);
  chip.addEventListener("click", () => goTo(token.step.index, sequence, token));
  return chip;
}

/** Mark the prompt tokens that the step computed and the tokens that it drew, and dim later tokens. */
function showView({ details, prompt, answers }) {
  if (!details.open) return;
  const parts = answers.map(({ sequence }) => sequence.runs.get(now.step.index)).filter(Boolean);
  prompt.forEach((span, i) => span.classList.toggle("now", parts.some(({ num, start }) => i >= start && i < start + num)));
  for (const { sequence, select, chips, tail } of answers) {
    select.setAttribute("aria-current", sequence === now.sequence);
    sequence.tokens.forEach((token, i) => {
      chips[i].classList.toggle("later", token.step.index > now.step.index);
      chips[i].classList.toggle("now", token.step === now.step);
      chips[i].setAttribute("aria-pressed", token === now.token);
      chips[i].tabIndex = token === now.token ? 0 : -1; // N and P reach the others
    });
    showTail(sequence, tail);
  }
}

/** Scroll the text, and not the page, until the selected token is in sight. */
function scrollToToken() {
  const box = byId("requests"), top = box.querySelector("[aria-pressed=true]")?.offsetTop - box.offsetTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 2;
}

/** Below the answer: the text that the step holds back, or why the sequence ended. */
function showTail({ tokens, last }, tail) {
  const isOver = last && now.step.index >= last.at;
  const why = typeof last?.why === "string" ? ` “${visibleText(last.why)}”` : last?.why != null ? ` id ${last.why}` : "";
  const held = heldWords(newest(tokens.filter(token => token.step.index <= now.step.index)));
  tail.textContent = isOver ? `ended: ${last.reason}${why}` : held;
  tail.classList.toggle("held", !isOver);
}

function heldWords(token) {
  if (token?.num_held_ids) return `held back: ${plural(token.num_held_ids, "id")}, not yet a whole character`;
  return token?.held ? `held back: “${visibleText(token.held)}”, may become a stop string` : "";
}

// ---- one token: stages and intervals
const PARAMETERS = { // what a stage reads
  keep_allowed: "allowed_token_ids", keep_grammatical: "structured_outputs",
  end_thinking: "thinking_token_budget", mask_bad_words: "bad_words", mask_min_tokens: "min_tokens", add_logit_bias: "logit_bias",
  apply_repetition_penalty: "repetition_penalty", apply_frequency_penalty: "frequency_penalty",
  apply_presence_penalty: "presence_penalty", mask_repeated_ngrams: "no_repeat_ngram_size", apply_temperature: "temperature",
  keep_min_p: "min_p", keep_top_k: "top_k", keep_top_p: "top_p",
};
const OTHER_STAGES = { model: "the model's probabilities", apply_logits_processors: "this request's logits_processors" };
const CUTS = ["keep_min_p", "keep_top_k", "keep_top_p"];
const NO_STAGES = "The sampler's stages were not recorded. Record with Recorder(stages=True), or nanoinfer explain.";
const MOST_DROPPED = 10; // candidates after these are shown only if they can still be drawn

function showToken() {
  const { token } = now;
  byId("token-title").textContent = token ? `Token “${visibleText(token.token, token.token_id)}”` : "Token";
  const which = now.sequence ? `No token of sequence ${now.sequence.id}` : "No token";
  if (!token) return byId("token").replaceChildren(el("p.muted", {}, `${which} was drawn in this step.`));
  const sequence = run.sequences.get(token.sequence_id), key = `${token.sequence_id} ${token.position}`;
  const out = token.text === "" ? "released no text" : `released “${visibleText(token.text)}”`;
  const place = `id ${token.token_id}, position ${token.position}, drawn in step ${token.step.event.step}`;
  byId("token").replaceChildren(
    el("p", {}, owner(sequence), ` ${[place, out, heldWords(token)].filter(Boolean).join(", ")}`),
    el("p", { id: "explanation" }, explanationOf(token, sequence)),
    run.stages.has(key) ? stagesOf(run.stages.get(key), token, sequence.request.params) : el("p.muted", {}, NO_STAGES),
    ...(run.draws.has(key) ? drawOf(run.draws.get(key)) : []));
}

/** Why the token is there: what the step computed, what the stages removed, how it was chosen. */
function explanationOf(token, sequence) {
  const key = `${sequence.id} ${token.position}`, other = otherText(token);
  const stages = run.stages.get(key), draw = run.draws.get(key);
  const sentences = [computedWords(token, sequence), draftWords(token, sequence)];
  if (stages && draw) sentences.push(...sampledWords(stages, draw, token, sequence.request.params));
  if (token.finish_reason) sentences.push(`It ended the sequence: ${token.finish_reason}.`);
  if (other === null) sentences.push("The other run has no token here.");
  else if (other !== undefined) sentences.push(`The other run has “${visibleText(other)}” here.`);
  return sentences.filter(Boolean).join(" ");
}

function computedWords({ step }, { runs, request }) {
  const part = runs.get(step.index), name = `Step ${step.event.step}`, numPrompt = request.promptIds.length;
  if (!part) return `${name} drew it from the row of another answer to the same prompt, whose blocks this sequence shares.`;
  const { start, num } = part, isAgain = start + num > numPrompt;
  const cached = start ? ` The keys and values of the ${plural(start, "token")} before were read from the cache.` : "";
  if (start >= numPrompt && num === 1) return `${name} computed the newest token of the sequence (decode).${cached}`;
  const what = isAgain ? "prompt and output again, after a preemption" : `a prompt of ${numPrompt}`;
  return `${name} computed ${plural(num, "token")} of ${what} (prefill).${cached}`;
}

function draftWords(token, sequence) {
  const draft = draftOf(sequence, token.step);
  if (!draft) return "";
  const index = draft.drawn.indexOf(token), guess = draft.ids[index], which = `raft ${index + 1} of ${draft.ids.length}`;
  if (index < draft.numAccepted) return `It equals d${which}, which was therefore accepted.`;
  if (guess === undefined) return `All ${draft.ids.length} drafts before it were accepted.`;
  return `D${which}, “${visibleText(textOf(guess), guess)}”, differs from it and was rejected.`;
}

function sampledWords(stages, draw, token, params) {
  const isIt = ({ token_id: id }) => id === token.token_id, last = newest(stages), number = n => n.toLocaleString("en");
  const rank = stages[0].candidates.findIndex(isIt) + 1, { before } = stages[0].candidates[rank - 1];
  const place = rank <= MOST_DROPPED ? `, rank ${rank} of ${number(run.engine.vocab_size)}` : ""; // of the most probable
  const sentences = [`The model gave it ${percent(before)}${place}.`];
  const removals = stages.slice(1).map(({ stage, num_left: left }, i) => ({ stage, num: stages[i].num_left - left }));
  const removed = removals.filter(({ num }) => num > 0).map(({ stage, num }) =>
    `${parameterOf(stage, params) || stage} removed ${number(num)} ${num === 1 ? "token" : "tokens"}`);
  const left = `${number(last.num_left)} ${last.num_left === 1 ? "was" : "were"} left`;
  if (removed.length) sentences.push(`${removed.join(", ")}. ${left}.`);
  if (draw.u === null) return [...sentences, "A greedy row (temperature=0) takes the most probable token that is left."];
  const after = last.candidates.find(isIt).after, interval = `[${draw.low.toFixed(4)}, ${draw.high.toFixed(4)})`;
  if (percent(after) !== percent(before)) sentences.push(`Its probability was then ${percent(after)}.`);
  return [...sentences, `The random number u = ${draw.u.toFixed(4)} is in its interval ${interval} of the cumulative weights.`];
}

/** "top_k=5", or "" if the stage's parameter is not set. */
function parameterOf(stage, params) {
  const name = PARAMETERS[stage];
  return name in params ? `${name}=${params[name]}` : "";
}

/** The text of the other run's token at this place: undefined if it is the same token, null if there is none. */
const otherText = ({ sequence_id: id, position }) => DIFFERENCES?.[id]?.[position];

/** A column of bars per stage, all on one scale. */
function stagesOf(stages, token, params) {
  const widest = Math.max(...stages.flatMap(({ candidates }) => candidates.flatMap(({ before, after }) => [before, after])));
  return el("div", { id: "stages" }, ...stages.map(stage => {
    const name = PARAMETERS[stage.stage], value = parameterOf(stage.stage, params);
    const left = `${stage.num_left} of ${run.engine.vocab_size} tokens left, entropy ${stage.entropy.toFixed(2)} bits`;
    const what = [value || OTHER_STAGES[stage.stage] || (name ?? "a user's stage"), el("br"), left];
    if (stage.stage !== "model" && stage.candidates.every(isAsBefore)) {
      what.push(el("br"), "no visible change among the most probable tokens");
      return el("div.stage", {}, el("h3.mono", {}, stage.stage), el("p.small.muted", {}, ...what));
    }
    const shown = stage.candidates.filter(({ after }, i) => after > 0 || i < MOST_DROPPED);
    const rows = shown.map(candidate => candidateRow(candidate, widest, candidate.token_id === token.token_id));
    const numKept = shown.filter(({ after }) => after > 0).length, isBelow = numKept === shown.length;
    const cut = isBelow ? "the cutoff is further down, among less probable tokens" : "cutoff: tokens below are dropped";
    if (CUTS.includes(stage.stage)) rows.splice(numKept, 0, el("div.cut", {}, cut));
    return el("div.stage", {}, el("h3.mono", {}, stage.stage), el("p.small.muted", {}, ...what), ...rows);
  }));
}

const isAsBefore = ({ before, after }) => Math.abs(before - after) < 0.0005 && after > 0 === before > 0;

/** Before: the outline. After: the solid bar. */
function candidateRow({ token_id: id, token, before, after }, widest, isDrawn) {
  const bar = (className, p) => el("i", { className, style: `width:${p / widest * 100}%`, hidden: p / widest < 0.002 });
  const lane = el("span.lane", {}, bar("before", before), bar("after", after));
  const className = `candidate small ${after > 0 ? "" : "out"} ${isDrawn ? "drawn" : ""}`;
  return el("div", { className, title: `id ${id}: before ${before}, after ${after}` },
    el("span.text", {}, ...visible(token, id)), lane, el("span.percent", {}, percent(after)));
}

/** The draw: [0, 1) divided into the tokens' intervals in order of ids, and u. */
function drawOf({ token_id, u, intervals: parts }) {
  const left = x => `left:${x * 100}%`, under = x => `${left(x)};transform:translateX(${-x * 100}%)`;
  const box = el("div", { id: "intervals" }, el("div.part.cached", {}));
  for (const part of parts) {
    const label = visibleText(part.token, part.token_id), className = `part ${part.token_id === token_id ? "drawn" : ""}`;
    const title = `“${label}”, id ${part.token_id}: ${part.low} to ${part.high}`;
    const style = `${left(part.low)};width:${(part.high - part.low) * 100}%`;
    box.append(el("div", { className, title, style }, el("span", {}, label)));
  }
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) box.append(el("span.tick", { style: under(tick) }, `${tick}`));
  const isWhole = sum(parts.map(part => part.high - part.low)) > 0.999;
  if (u !== null) box.append(el("i.mark", { style: left(u) }), el("span.u", { style: under(u) }, `u = ${u.toFixed(4)}`));
  return [el("h3", { style: "margin-top:14px" }, "The draw"), box,
    el("p.small.muted", {}, `In order of token ids.${isWhole ? "" : " Hatched: all other tokens, too narrow to show."}`)];
}
