// Part 2: the header and the timeline.

// ---- header
function drawHeader() {
  const { model, num_parameters, dtype, device, attention_backend, num_blocks } = run.engine;
  byId("facts").append(facts({
    model, parameters: num_parameters.toLocaleString("en"), dtype, device, attention: attention_backend,
    cache: `${num_blocks} blocks × ${BLOCK_SIZE} tokens`, requests: run.requests.size, steps: run.steps.length,
    "tokens drawn": sum(run.rows.map(sequence => sequence.tokens.length)),
    "time in steps": duration(sum(run.steps.map(step => total(step.times)))),
    ...draftCounts(run.steps),
  }));
}

// ---- timeline
const ROOM = byId("timeline").clientWidth - 280; // beside the names, and how the last one ended
const WIDTH = clamp(Math.floor(ROOM / run.steps.length), 12, 26); // of a step, in pixels
const TRACK = run.steps.length * WIDTH + 80;

function drawTimeline() {
  const inside = el("div.inside", { style: `--w:${WIDTH}px` });
  inside.append(axisRow(), ...run.rows.map(sequenceRow), timesRow(), el("div", { id: "band" }));
  inside.addEventListener("click", event => {
    const track = event.target.closest(".track");
    if (!track) return;
    const index = Math.floor((event.clientX - track.getBoundingClientRect().left) / WIDTH);
    goTo(index, run.sequences.get(track.dataset.sequence));
  });
  byId("timeline").append(inside);
  const seen = new Set(run.rows.flatMap(sequence => run.steps.map(step => kindAt(sequence, step))));
  byId("timeline-legend").append(
    ...Object.keys(KINDS).filter(kind => seen.has(kind)).map(kind => legend(kind, KINDS[kind])),
    ...PHASES.map(phase => legend("", phase, `background:var(--${phase})`)));
}

const newTrack = (...children) => el("div.track", { style: `width:${TRACK}px` }, ...children);
const row = (kind, name, track) => el(`div.row${kind}`, {}, el("div.name", {}, ...name), track);

function axisRow() {
  const marked = run.steps.filter(step => step.event.step % (WIDTH > 20 ? 5 : 10) === 0);
  const marks = marked.map(({ index, event }) => el("span", { style: `left:${(index + 0.5) * WIDTH}px` }, `${event.step}`));
  return row(".axis", ["step"], newTrack(...marks));
}

/** Neighbouring steps of one kind are one element, so that hundreds of steps of 64 sequences stay light. */
function sequenceRow(sequence) {
  const { last, request } = sequence, track = newTrack();
  track.dataset.sequence = sequence.id;
  let cell = null, cellKind = "", start = 0, end = 0; // the cell that grows, and where everything ends
  for (const step of run.steps) {
    const kind = kindAt(sequence, step);
    if (kind !== cellKind || kind === "prefill" || kind === "drafts") {
      cell = kind ? track.appendChild(timelineCell(sequence, step, kind)) : null;
      [cellKind, start] = [kind, step.index];
    }
    if (!kind) continue;
    end = step.index + 1;
    cell.style.width = `${(end - start) * WIDTH}px`;
  }
  track.setAttribute("role", "img");
  track.setAttribute("aria-label", `sequence ${sequence.id} ran in ${plural(sequence.runs.size, "step")}`);
  if (last) track.append(el("span.end", { style: `left:${end * WIDTH}px` }, `■ ${last.reason}`));
  const prompt = request.prompt.slice(0, 60).trim() || plural(request.promptIds.length, "token");
  return row("", [owner(sequence), ` ${prompt}`], track);
}

function timelineCell(sequence, step, kind) {
  const cell = el("div", { className: `cell ${kind}`, style: `left:${step.index * WIDTH}px` });
  if (kind === "preempted" || kind === "fork") cell.append(kind[0].toUpperCase());
  if (kind === "drafts") {
    const { ids, numAccepted } = draftOf(sequence, step);
    cell.style.setProperty("--right", `${(1 + numAccepted) / (1 + ids.length) * 100}%`);
    if (numAccepted) cell.append(`+${numAccepted}`);
  }
  if (kind === "prefill") {
    const { num } = sequence.runs.get(step.index), much = clamp(75 + 3 * Math.log2(num), 75, 100);
    cell.style.setProperty("--much", `${much}%`);
    if (`${num}`.length * 6 <= WIDTH) cell.append(`${num}`);
  }
  return cell;
}

/** A bar per step. One slow step would flatten all others, so the longest bars are clipped. */
function timesRow() {
  const sorted = run.steps.map(step => total(step.times)).sort((a, b) => a - b);
  const top = Math.min(newest(sorted), 1.5 * sorted[Math.floor(sorted.length * 0.9)]);
  const bars = run.steps.filter(step => step.times).map(({ index, times }) => {
    const height = Math.min(total(times) / top, 1) * 52;
    return el("i.bar", { style: `left:${index * WIDTH}px;height:${height}px;${layers(times, "to top")}` });
  });
  const truncated = newest(sorted) > top ? "longer bars truncated" : "";
  const name = ["time of a step", el("br"), `full height: ${duration(top)}`, el("br"), truncated];
  return row(".times", name, newTrack(...bars));
}

function showTimeline() {
  const timeline = byId("timeline"), name = timeline.querySelector(".name").offsetWidth, x = now.step.index * WIDTH;
  const from = timeline.scrollLeft, width = timeline.clientWidth - name;
  byId("band").style.left = `${name + x}px`;
  if (x >= from && x + WIDTH <= from + width) return; // in sight
  timeline.scrollLeft = x - width / 3;
}
