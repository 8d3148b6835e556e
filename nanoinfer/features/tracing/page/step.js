// Part 3: the selected step: its batch, its times, and the block pool.

// ---- step
const MOST_ROWS = 200; // of the packed batch, to keep the page small

function showStep() {
  const { event, times, batch } = now.step, isOpen = byId("batch")?.open ?? true;
  byId("step-title").textContent = `Step ${event.step}`;
  const runs = event.sequence_ids.map((id, i) => {
    const sequence = run.sequences.get(id), draft = draftOf(sequence, now.step);
    const kind = draft ? "decode" : kindAt(sequence, now.step), drafts = draft ? ` + ${plural(draft.ids.length, "draft")}` : "";
    return owner(sequence, `: ${kind} ${event.num_new_tokens[i]}${drafts}`);
  });
  const counts = facts({ running: event.running.length, waiting: event.num_waiting,
                         "free blocks": `${event.num_free_blocks} of ${run.engine.num_blocks}`,
                         preempted: event.preempted.map(id => `sequence ${id}`).join(", ") || "none",
                         "packed tokens": batch ? batch.input_ids.length : sum(event.num_new_tokens),
                         ...draftCounts([now.step]) });
  const table = batch ? batchTable(batch, isOpen) : [];
  byId("step").replaceChildren(counts, el("div.runs", {}, ...runs), ...timesOf(times), ...table);
}

// Qwen3-0.6B's layers have 440 million weights, and its LM head has 156 million. On two cores, in bfloat16, forward took 3.5 times
// as long as sample with one sequence, and 2.4 times as long with eight (2026-11-29).
const TINY = "This model is so small that the LM head and the draw (sample) take as long as its layers (forward), or longer. With " +
  "Qwen3-0.6B, forward takes about 3 times as long as sample: its layers have 2.8 times the weights of its LM head.";

function timesOf(times) {
  if (!times) return [el("p.muted.small", {}, "This step has no times. It failed, or the recording ended in it.")];
  return [el("div.share", { style: layers(times, "to right") }),
    el("div.legend", {},
      ...PHASES.map(phase => legend("", `${phase} ${duration(times[phase])}`, `background:var(--${phase})`)),
      el("span", {}, `total ${duration(total(times))}`),
      el("span", {}, times.trace ? `not included: recording the sampler's stages ${duration(times.trace)}` : "")),
    ...(run.engine.num_parameters < 1e7 ? [el("p.muted.small", {}, TINY)] : [])];
}

/** The step as the model sees it: all sequences' new tokens in one row. */
function batchTable(batch, isOpen) {
  const num = batch.input_ids.length, body = el("tbody");
  let row = 0;
  for (let index = 0; index < Math.min(num, MOST_ROWS); index++) {
    const id = batch.input_ids[index], position = batch.positions[index], slot = batch.slot_mapping[index];
    if (index === batch.query_start_loc[row + 1]) row++;
    const sequence = run.sequences.get(batch.sequence_ids[row]);
    const known = tokenAt(sequence, position), isRight = known && (id < 0 || known.id === id);
    const token = isRight ? known : { id, text: textOf(id) };
    const draft = isDraft(batch, row) ? ` (draft, ${isRight ? "accepted" : "rejected"})` : "";
    const numRows = batch.logits_indices.filter(wanted => wanted === index).length; // several if the prompt's answers fork
    const text = el("span", {}, ...visible(token.text, token.id), id < 0 ? " (on the device)" : draft);
    const place = `${Math.floor(slot / BLOCK_SIZE)}·${slot % BLOCK_SIZE}`;
    const columns = [index, owner(sequence), text, position, place, numRows > 1 ? `yes, ×${numRows}` : numRows ? "yes" : ""];
    body.append(el("tr", { className: numRows ? "head" : "" }, ...columns.map(column => el("td", {}, column))));
  }
  const head = ["packed", "sequence", "token", "position", "slot (block · offset)", "LM head"].map(name => el("th", {}, name));
  return [el("details", { id: "batch", open: isOpen, style: "margin-top:10px" },
    el("summary.small", {}, "The packed batch"),
    el("div.scroll", { tabindex: 0 }, el("table", {}, el("thead", {}, el("tr", {}, ...head)), body)),
    el("p.muted.small", {}, num > MOST_ROWS ? `${num - MOST_ROWS} more` : ""))];
}

// ---- block pool
/** Block tables, lengths and cached blocks as the model saw them in the step, replayed from the first event. */
function poolAt(step) {
  const pool = { tables: new Map(), lengths: new Map(), cached: new Set(), holders: new Map(), news: [] };
  const since = run.steps[step.index - 1]?.pictureAt ?? -1;
  for (const event of run.pool) {
    if (event.at > step.pictureAt) break;
    applyBlockEvent(pool, event);
    if (event.at > since && event.event !== "BatchBuilt") pool.news.push(event);
  }
  for (const [id, own] of pool.tables) {
    own.forEach((table, group) => table.forEach((block, index) => {
      if (block >= 0) pool.holders.set(block, [...(pool.holders.get(block) ?? []), { id, group, from: index * BLOCK_SIZE }]);
    }));
  }
  return pool;
}

/** tables: of each sequence, one for each KV group. A block that a window has left is -1 in them. */
function applyBlockEvent({ tables, lengths, cached }, event) {
  const { sequence_id: id, blocks, group = 0 } = event, own = tables.get(id) ?? [];
  const append = () => tables.set(id, Object.assign([...own], { [group]: [...(own[group] ?? []), ...blocks] }));
  const replace = change => tables.set(id, own.map(table => table.map(change)));
  switch (event.event) {
    case "BlocksShared": append(); namesOfBlocks(event).forEach(block => cached.add(block)); break;
    case "BlocksAllocated": append(); break;
    case "BlockCopied": replace(block => (block === event.source ? event.target : block)); break;
    case "BlockEvicted": cached.delete(event.block); break;
    case "BlocksCached": blocks.forEach(block => cached.add(block)); break;
    case "BlocksForked":
      tables.set(id, tables.get(event.parent_id) ?? [blocks]);
      lengths.set(id, lengths.get(event.parent_id) ?? 0);
      break;
    case "BlocksFreed": tables.delete(id); break;
    case "BlocksReleased": replace(block => (blocks.includes(block) ? -1 : block)); break;
    case "BatchBuilt": event.sequence_ids.forEach((running, i) => lengths.set(running, event.seq_lens[i])); break;
  }
}

/** A block event as a sentence. */
function newsWords(event) {
  const { event: kind, sequence_id: id, ...more } = event, blocks = namesOfBlocks(event), who = `sequence ${id}`;
  const isOfOne = kind === "BlocksShared" || kind === "BlocksAllocated"; // the other events tell of all groups
  const which = `${blocks.length === 1 ? "block" : "blocks"} ${blocks.join(", ")}${isOfOne ? groupWords(event) : ""}`;
  switch (kind) {
    case "BlocksShared": return `${who} had a prefix cache hit on ${which}`;
    case "BlocksAllocated": return `${who} was allocated ${which}`;
    case "BlockCopied": return `${who} copied shared block ${more.source} to block ${more.target} before writing`;
    case "BlockEvicted": return `block ${more.block} was evicted from the prefix cache`;
    case "BlocksCached": return `${which} of ${who} entered the prefix cache`;
    case "BlocksForked": return `${who} forked from sequence ${more.parent_id} and shares ${which}`;
    case "BlocksFreed": return `${who} freed ${which}`;
    case "BlocksReleased": return `${who} freed ${which}, which its window has left`;
  }
}

const namesOfBlocks = ({ blocks, block, target }) => blocks?.filter(one => one >= 0) ?? [block ?? target];
const hasGroups = run.pool.some(({ group }) => group > 0);
const groupWords = ({ group }) => (hasGroups ? ` of KV group ${group}` : "");
const NEWS = { // in one word
  BlockEvicted: "evicted", BlocksShared: "hit", BlocksAllocated: "new", BlocksForked: "fork", BlockCopied: "copy",
};

/** One word per block for what happened to it in the step: an eviction, which precedes the block's next use, or that use. */
function newsOfBlocks(news) {
  const words = new Map();
  for (const event of news) {
    for (const block of namesOfBlocks(event)) {
      if (event.event === "BlocksFreed") words.delete(block); // its use in this step has ended
      else if (event.event in NEWS && !words.has(block)) words.set(block, NEWS[event.event]);
    }
  }
  return words;
}

const touched = run.pool.filter(event => event.event !== "BatchBuilt").flatMap(namesOfBlocks);
const BLOCKS = [...new Set(touched)].sort((a, b) => a - b);
const cells = new Map(); // block -> its button, which stays, so that focus stays

function drawPool() {
  for (const block of BLOCKS) {
    const cell = el("button.block", { type: "button" });
    cell.dataset.block = block;
    const show = () => { now.block = block; showBlock(); };
    for (const happening of ["mouseenter", "focus"]) cell.addEventListener(happening, show);
    cells.set(block, cell);
  }
  byId("pool-grid").append(...cells.values());
  byId("pool-legend").append(
    legend("owner", "in use: #block, and its sequence in its colour. Bar: fill level", "--hue:210;padding:0"),
    el("span", {}, "×2: shared by 2 sequences"), el("span", {}, "•: in the prefix cache"),
    legend("cached", "free but cached", "border:1px solid var(--line)"),
    legend("", "free", "border:1px dashed var(--muted)"), legend("", "evicted in this step", "border:2px solid var(--bad)"));
}

function showPool() {
  const pool = now.pool = poolAt(now.step), news = newsOfBlocks(pool.news), { num_blocks } = run.engine;
  for (const [block, cell] of cells) showCell(cell, block, news.get(block));
  const numHeld = pool.holders.size, numCached = [...pool.cached].filter(block => !pool.holders.has(block)).length;
  const unused = num_blocks - BLOCKS.length, isWhole = run.steps[0].event.step === 0;
  byId("pool-counts").textContent = `While the model ran: ${numHeld} in use, ${numCached} free but cached, ` +
    `${num_blocks - numHeld - numCached} free${unused ? `; ${plural(unused, "block")} never used, not shown` : ""}.` +
    (isWhole ? "" : " The recording begins in the middle of the run. The earlier contents of blocks are not known.");
  const after = isLast() ? run.pool.filter(event => event.at > now.step.pictureAt && event.event === "BlocksFreed") : [];
  const isShown = ({ sequence_id: id }) => id === undefined || run.sequences.has(id); // beams have no rows
  const words = pool.news.filter(isShown).map(newsWords), later = after.filter(isShown).map(newsWords);
  byId("pool-news").replaceChildren(...[...words, ...later.map(text => `then ${text}`)].map(text => el("li", {}, text)));
  showBlock();
}

/** How many tokens a holder has in its block. */
const numIn = ({ id, from }) => clamp((now.pool.lengths.get(id) ?? 0) - from, 0, BLOCK_SIZE);

function showCell(cell, block, news) {
  const holders = now.pool.holders.get(block) ?? [], isCached = now.pool.cached.has(block);
  const words = blockWords(block, holders, isCached, news);
  if (words === cell.getAttribute("aria-description")) return; // as it was
  cell.setAttribute("aria-description", words);
  const kind = holders.length ? "held" : isCached ? "cached" : "empty";
  const hues = holders.slice(0, 4).map(({ id }) => run.sequences.get(id)?.hue ?? 0), part = 100 / hues.length;
  const stripes = hues.map((hue, i) => `hsl(${hue} var(--own)) ${i * part}% ${(i + 1) * part}%`);
  cell.className = `block ${kind} ${news === "evicted" ? "evicted" : ""}`;
  cell.style = hues.length ? `--hue:${hues[0]};background:linear-gradient(100deg, ${stripes})` : "";
  cell.replaceChildren(
    el("span", {}, `#${block}${isCached ? " •" : ""}`), el("b", {}, holders.map(({ id }) => id).join(" ")),
    el("span", {}, news ?? { held: "", cached: "cached", empty: "free" }[kind]),
    el("span.badge", {}, holders.length > 1 ? `×${holders.length}` : ""),
    el("i.fill", { style: `width:${Math.max(0, ...holders.map(numIn)) / BLOCK_SIZE * 100}%` }));
}

function blockWords(block, holders, isCached, news) {
  const whose = holders.map(holder => {
    const num = numIn(holder), to = holder.from + num - 1;
    return `sequence ${holder.id}${groupWords(holder)}, ${num ? `positions ${holder.from}–${to}` : "nothing yet"}`;
  });
  const parts = [...(whose.length ? whose : ["free"]), ...(isCached ? ["in the prefix cache"] : [])];
  return `block ${block}${news ? ` (${news})` : ""}: ${parts.join("; ")}`;
}

/** The selected block: its description, and its text, taken from one of its holders. */
function showBlock() {
  const words = cells.get(now.block)?.getAttribute("aria-description") ?? "Point at a block to see its tokens.";
  const holder = now.pool.holders.get(now.block)?.[0], sequence = run.sequences.get(holder?.id);
  const tokens = sequence ? Array.from({ length: numIn(holder) }, (_, i) => tokenAt(sequence, holder.from + i)) : [];
  const text = tokens.flatMap(token => (token ? visible(token.text, token.id) : []));
  byId("block-words").replaceChildren(words, el("br"), el("span.muted", {}, ...text));
}
