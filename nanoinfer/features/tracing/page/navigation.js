// Part 5: what is selected, moving through the steps, links, keys. It starts the page.

// ---- moving through the steps
const now = { step: run.steps[0], sequence: null, token: null, block: null, pool: null, timer: null };

/** Go to a step. The token panel shows the selected sequence's token. Without a selection it shows the first one drawn. */
function goTo(index, sequence = now.sequence, token = null) {
  now.step = run.steps[clamp(index, 0, run.steps.length - 1)];
  now.sequence = sequence;
  const drawing = sequence ?? run.rows.find(one => one.byStep.has(now.step));
  now.token = token ?? drawing?.byStep.get(now.step)?.[0] ?? null;
  for (const show of [showControls, showLink, showTimeline, showStep, showPool, showToken]) show();
  views.forEach(showView);
  scrollToToken();
  if (DIFFERENCES && !isAnswering) parent.postMessage(whereItIs(), "*");
}

// ---- beside another run: comparison.html moves both pages
let isAnswering = false; // while the page goes where the other is, and does not announce it

/** Where the page is, as the other run can find it: the step, or the selected sequence and what is known of it. */
function whereItIs() {
  const sequence = selected(), part = sequence?.runs.get(now.step.index);
  const position = now.token?.sequence_id === sequence?.id ? now.token?.position : undefined;
  return { step: now.step.index, sequence: sequence?.id, position, numComputed: part && part.start + part.num };
}

/** Go to a step of that index, or where the sequence's token at a position was drawn or its first tokens were computed. */
function answer({ step, sequence: id, position, numComputed }) {
  const sequence = run.sequences.get(id), token = sequence?.byPosition.get(position);
  isAnswering = true;
  if (step !== undefined) goTo(step, sequence);
  else if (token) goTo(token.step.index, sequence, token);
  else if (sequence && numComputed) {
    const found = [...sequence.runs].find(([, { start, num }]) => start + num >= numComputed);
    if (found) goTo(found[0], sequence);
  }
  isAnswering = false;
}

/** The selected sequence: the one that was clicked, or the one whose token is shown. */
const selected = () => now.sequence ?? run.sequences.get(now.token?.sequence_id) ?? run.rows[0];

/** The selected sequence's next token after the step (direction 1), or the last one before it (-1). */
function neighbour(direction) {
  const tokens = selected().tokens, { index } = now.step;
  if (tokens.includes(now.token)) return tokens[tokens.indexOf(now.token) + direction];
  if (direction > 0) return tokens.find(({ step }) => step.index > index);
  return newest(tokens.filter(({ step }) => step.index < index));
}

function moveToken(direction) {
  const token = neighbour(direction);
  if (token) goTo(token.step.index, selected(), token);
}

/** The token for which the model was least certain, or undefined if no stages were recorded. */
function leastCertain() {
  let found, greatest = -1;
  for (const token of run.rows.flatMap(sequence => sequence.tokens)) {
    const model = run.stages.get(`${token.sequence_id} ${token.position}`)?.[0];
    if (model?.entropy > greatest) [found, greatest] = [token, model.entropy];
  }
  return found;
}

// ---- links: #step=17&token=4 is step 17, with the token of sequence 4
let linkTimer = null;

function showLink() {
  if (location.protocol === "about:") return; // inside a notebook the page has no address
  const token = now.sequence ? `&token=${now.sequence.id}` : "";
  const link = byId("link").textContent = byId("link").href = `#step=${now.step.event.step}${token}`;
  clearTimeout(linkTimer);
  linkTimer = setTimeout(() => history.replaceState(null, "", link), 350); // browsers limit how often a page may do this
}

/** Go where the address points. Returns whether it names a step. */
function followLink() {
  const link = new URLSearchParams(location.hash.slice(1));
  const step = run.steps.find(({ event }) => `${event.step}` === link.get("step"));
  if (step) goTo(step.index, run.sequences.get(link.get("token")) ?? null);
  return Boolean(step);
}

function showControls() {
  const { index, event } = now.step;
  byId("slider").value = index;
  byId("slider").setAttribute("aria-valuetext", `step ${event.step}, ${plural(event.sequence_ids.length, "sequence")}`);
  byId("step-label").textContent = `${event.step} (${index + 1} of ${run.steps.length})`;
}

const PACE = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1200 : 300; // milliseconds per step

const isLast = () => now.step === newest(run.steps);

function play() {
  if (isLast()) goTo(0); // again from the start
  clearInterval(now.timer);
  now.timer = setInterval(() => {
    goTo(now.step.index + 1);
    if (isLast()) pause();
  }, PACE / byId("speed").value);
  byId("play").textContent = "Pause";
}

function pause() {
  clearInterval(now.timer);
  now.timer = null;
  byId("play").textContent = "Play";
}

const togglePlaying = () => (now.timer === null ? play() : pause());

function onKey(event) {
  const moves = { ArrowLeft: now.step.index - 1, ArrowRight: now.step.index + 1, Home: 0, End: run.steps.length - 1 };
  const { key, target } = event, isToken = target.matches("[role=button]");
  if (event.ctrlKey || event.altKey || event.metaKey || target.matches("input, select")) return; // they have their own keys
  if (key in moves) goTo(moves[key]);
  else if (key === "n" || key === "p") moveToken(key === "n" ? 1 : -1);
  else if (isToken && (key === "Enter" || key === " ")) target.click();
  else if (key === " " && !target.closest("button, summary")) togglePlaying();
  else return;
  event.preventDefault(); // no scrolling besides
}

document.documentElement.classList.toggle("compared", DIFFERENCES !== null);
drawHeader();
drawTimeline();
drawPool();
drawText();
byId("slider").max = run.steps.length - 1;
byId("slider").addEventListener("input", event => goTo(Number(event.target.value)));
byId("play").addEventListener("click", togglePlaying);
byId("speed").addEventListener("change", () => now.timer !== null && play());
addEventListener("hashchange", followLink);
if (DIFFERENCES) addEventListener("message", event => event.source === parent && answer(event.data));
document.addEventListener("keydown", onKey);
addEventListener("resize", showTimeline);
isAnswering = true;
if (!followLink()) {
  const token = leastCertain();
  goTo(token?.step.index ?? 0, run.sequences.get(token?.sequence_id));
}
isAnswering = false;
