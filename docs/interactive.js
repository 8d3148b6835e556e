/* The interactive parts of the site. A page says <figure class="interactive" data-kind="KIND" ...>, with a picture or a sentence
   for readers without scripts, and STARTS[KIND] fills the figure. mkdocs_hooks.py inserts the data of interactive.py. What has
   the class "fallback" is not shown then. */
"use strict";
const interactive = (() => {
  const ADDRESS = document.currentScript.src; // of this file

  // ---- building blocks

  const make = (tag, attributes = {}, ...children) => {
    const space = ["svg", "rect", "line", "text", "title"].includes(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml";
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes))
      name.startsWith("on") ? element.addEventListener(name.slice(2), value) : element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const number = (value, digits = 3) => {
    const rounded = Number(value.toPrecision(digits));
    return Math.abs(rounded) >= 1000 ? Math.round(value).toLocaleString("en-US") : String(rounded);
  };
  const words = () => make("p", { role: "status" }); // read aloud when it changes
  const button = (text, onclick) => make("button", { type: "button", onclick }, text);

  /* A labelled number: a slider with its value, or a field. read() throws nothing: a field that is no number has its first value. */
  const field = (label, value, { min = 0, max = 1e12, step = 1, slider = false } = {}, onchange) => {
    const shown = make("output");
    const show = () => shown.replaceChildren(input.value);
    const input = make("input", { type: slider ? "range" : "number", min, max, step, value, oninput: () => (show(), onchange()) });
    show();
    const read = () => Math.min(max, Math.max(min, Number.isFinite(input.valueAsNumber) ? input.valueAsNumber : value));
    return { read, element: make("label", {}, make("span", {}, label), input, ...(slider ? [shown] : [])) };
  };
  const choice = (label, values, chosen, onchange) => {
    const options = values.map((one, i) => make("option", { value: i, ...(i === chosen ? { selected: "" } : {}) }, String(one)));
    const select = make("select", { onchange }, ...options);
    const write = index => (select.value = index);
    return { read: () => Number(select.value), write, element: make("label", {}, make("span", {}, label), select) };
  };
  /* Rows of a name, a bar and its words. length and old (a thin line under the bar) are shares of the whole width. */
  const bars = rows => make("div", { class: "bars" }, ...rows.flatMap(({ name, length, old = 0, text, kind = "" }) => [
    make("span", { class: `name ${kind}` }, name),
    make("span", { class: "bar", "aria-hidden": "true" },
      make("i", { class: kind, style: `width: ${100 * Math.min(length, 1)}%` }), make("i", { class: "old", style: `width: ${100 * Math.min(old, 1)}%` })),
    make("span", { class: "text" }, text),
  ]));

  // ---- the sampler of notebook 07, in the order of nanoinfer/sampling/stages.py

  const sample = (logits, { temperature, topK, topP, minP }) => {
    const best = Math.max(...logits);
    if (temperature === 0) return logits.map((_, i) => Number(i === logits.indexOf(best)));
    let weights = logits.map(logit => Math.exp((logit - best) / temperature)); // the best one has weight 1
    weights = weights.map(weight => (weight < minP ? 0 : weight));
    const order = weights.map((_, i) => i).sort((a, b) => weights[b] - weights[a] || a - b);
    if (topK > 0 && topK < order.length) {
      const smallest = weights[order[topK - 1]]; // what ties with it stays
      weights = weights.map(weight => (weight < smallest ? 0 : weight));
    }
    if (topP < 1) {
      const enough = topP * weights.reduce((a, b) => a + b);
      let before = 0;
      for (const i of order) {
        const weight = weights[i];
        if (before >= enough) weights[i] = 0;
        before += weight;
      }
    }
    const total = weights.reduce((a, b) => a + b);
    return weights.map(weight => weight / total);
  };

  const sampler = (figure, { contexts }) => {
    const update = () => {
      const { logits, tokens } = contexts[context.read()];
      const [temperature, topK, topP, minP] = sliders.map(one => one.read());
      const before = sample(logits, { temperature: 1, topK: 0, topP: 1, minP: 0 });
      const after = sample(logits, { temperature, topK, topP, minP });
      const left = after.filter(p => p > 0), percent = p => (p === 0 ? "dropped" : p < 0.001 ? "< 0.1%" : `${(100 * p).toFixed(1)}%`);
      const scale = Math.max(...Object.keys(tokens).flatMap(id => [before[id], after[id]]));
      const ids = Object.keys(tokens).sort((a, b) => before[b] - before[a]);
      picture.replaceChildren(bars(ids.map(id => ({
        name: tokens[id], length: after[id] / scale, old: before[id] / scale, text: percent(after[id]), kind: after[id] ? "" : "out" }))));
      const entropy = left.reduce((sum, p) => sum - p * Math.log2(p), 0);
      status.textContent = `${left.length.toLocaleString("en-US")} of ${logits.length.toLocaleString("en-US")} tokens left, entropy ${Math.abs(entropy).toFixed(2)} bits.`;
    };
    const context = choice("Text so far", contexts.map(one => one.prompt), 0, update);
    const sliders = [["temperature", 1, 2, 0.05, 0], ["top_k (0 keeps all)", 0, 40, 1, 0], ["top_p", 1, 1, 0.01, 0.01], ["min_p", 0, 1, 0.01, 0]].map(
      ([name, value, max, step, min]) => field(name, value, { min, max, step, slider: true }, update));
    const picture = make("div"), status = words();
    figure.replaceChildren(context.element, ...sliders.map(one => one.element), status, picture,
      make("figcaption", {}, "Bar: the probability after all four. Thin line: the model's own. Dropped tokens can never be drawn."));
    update();
  };

  // ---- calculators, whose formulas are those of the notebooks

  const formulas = {
    kv: ([layers, heads, headDim, bytes, tokens]) => ({ perToken: 2 * layers * heads * headDim * bytes, all: 2 * layers * heads * headDim * bytes * tokens }),
    bend: ([tflops, bandwidth, bytes]) => ({ balance: (tflops * 1e12) / (bandwidth * 1e9), batch: ((tflops * 1e12) / (bandwidth * 1e9) * bytes) / 2 }),
    waste: ([blockSize, tokens, longest]) => {
      const held = Math.ceil(tokens / blockSize) * blockSize;
      return { empty: held - tokens, share: 1 - tokens / held, mean: (blockSize - 1) / 2, reserved: 1 - tokens / Math.max(longest, tokens) };
    },
    speculation: ([a, c, k]) => {
      const speed = n => Array.from({ length: n + 1 }, (_, i) => a ** i).reduce((x, y) => x + y) / (1 + c * n);
      const speeds = Array.from({ length: 13 }, (_, n) => speed(n));
      return { speed: speed(k), speeds, best: speeds.indexOf(Math.max(...speeds)) };
    },
  };
  const bytes = value => (value < 2 ** 20 ? `${number(value / 2 ** 10)} KiB` : value < 2 ** 30 ? `${number(value / 2 ** 20)} MiB` : `${number(value / 2 ** 30)} GiB`);
  const percent = value => `${number(100 * value, 2)}%`;
  const integer = { min: 1 }, share = { max: 1, step: 0.05, slider: true };
  const CALCULATORS = {
    kv: {
      fields: [["layers", 28, integer], ["KV heads", 8, integer], ["head dim", 128, integer], ["bytes per number", 2, { min: 0.5, step: 0.5 }], ["tokens", 4096, integer]],
      say: ({ perToken, all }, [, , , , tokens]) => [`${perToken.toLocaleString("en-US")} bytes per token, ${bytes(all)} for ${tokens.toLocaleString("en-US")} tokens.`],
    },
    bend: {
      fields: [["TFLOP/s", 989, { min: 0.001, step: 0.001 }], ["memory, GB/s", 3350, { min: 0.1, step: 0.1 }], ["bytes per weight", 2, { min: 0.5, step: 0.5 }]],
      say: ({ balance, batch }) => [`${number(balance)} FLOPs in the time of one byte, so the weights' bytes take as long as their arithmetic at a batch of ${number(batch)}.`],
    },
    waste: {
      fields: [["block size", 16, integer], ["tokens of the sequence", 100, integer], ["max_model_len", 512, integer]],
      say: ({ empty, share, mean, reserved }, [blockSize]) => [
        `${empty} of its slots are empty, ${percent(share)} of what it holds. Over all lengths, blocks of ${blockSize} leave ${mean} slots empty on average. `
        + `A reservation of max_model_len would leave ${percent(reserved)} empty.`],
    },
    speculation: {
      fields: [["a, chance that a draft is right", 0.6, share], ["c, price of a row in steps", 0.05, share], ["k, drafts per step", 4, { max: 12, slider: true }]],
      say: ({ speed, speeds, best }, [, , k]) => [
        `${number(speed)} times the speed of plain decoding with k = ${k}. The best is k = ${best}: ${number(speeds[best])}.`,
        bars(speeds.map((one, n) => ({ name: `k = ${n}`, length: one / Math.max(...speeds, 2), text: number(one), kind: n === k ? "chosen" : one < 1 ? "out" : "" }))),
      ],
    },
  };
  const calculator = figure => {
    const name = figure.dataset.formula, { fields, say } = CALCULATORS[name];
    const update = () => {
      const values = inputs.map(one => one.read()), [text, ...rest] = say(formulas[name](values), values);
      status.textContent = text;
      picture.replaceChildren(...rest);
    };
    const inputs = fields.map(([label, value, limits]) => field(label, value, limits, update));
    const status = words(), picture = make("div");
    figure.append(...inputs.map(one => one.element), status, picture);
    update();
  };

  // ---- predict, then reveal: the number is read from the next output in which the pattern is found

  const predict = figure => {
    const pattern = new RegExp(figure.dataset.find), unit = figure.dataset.unit ?? "";
    const choices = figure.dataset.choices?.split("|").map(Number);
    let cell = figure.closest(".jp-Cell"), found = null;
    while ((cell = cell?.nextElementSibling) && !found) found = cell.querySelector(".jp-Cell-outputWrapper")?.textContent.match(pattern) && cell;
    if (!found) return; // the question stays as it is
    const output = found.querySelector(".jp-Cell-outputWrapper"), hidden = [output]; // and the figure of the same numbers
    if (found.nextElementSibling?.matches(".celltag_figure")) hidden.push(found.nextElementSibling);
    const truth = Number(output.textContent.match(pattern)[1].replaceAll(",", ""));
    const reveal = guess => {
      hidden.forEach(one => one.classList.remove("not-yet"));
      if (guess === null) return form.remove();
      const most = 1.15 * Math.max(guess, truth), nearest = choices?.reduce((a, b) => (Math.abs(b - truth) < Math.abs(a - truth) ? b : a));
      const row = (name, value, kind) => ({ name, length: value / most, text: `${number(value)} ${unit}`, kind });
      form.replaceChildren(bars([row("you", guess, "chosen"), row("here", truth, "")]));
      const factor = Math.max(guess, truth) / Math.min(guess, truth);
      const off = Number.isFinite(factor) ? `by a factor of ${number(factor, 2)}` : `by ${number(Math.abs(guess - truth))} ${unit}`; // a guess of 0
      status.textContent = (choices ? guess === nearest : factor < 1.25) ? "Close. " : `Off ${off}. `;
      status.append("The output below has the measurement.");
    };
    const status = words(), form = make("form", { onsubmit: event => (event.preventDefault(), reveal(guess.read())) });
    const guess = choices ? null : field(`Your guess${unit && `, ${unit}`}`, 1, { step: "any" }, () => {});
    const ask = choices
      ? choices.map(one => button(`${number(one)} ${unit}`, () => reveal(one)))
      : [guess.element, make("button", { type: "submit" }, "Compare")];
    form.append(...ask, button("Just show it", () => reveal(null)));
    hidden.forEach(one => one.classList.add("not-yet"));
    figure.append(form, status);
  };

  // ---- a replay of the gallery in a frame

  const replay = figure => {
    const source = new URL(`../gallery/${figure.dataset.run}.html${figure.dataset.at ? `#${figure.dataset.at}` : ""}`, ADDRESS);
    figure.querySelector("img").replaceWith(make("iframe", { src: source, title: figure.querySelector("img").alt, loading: "lazy" }));
  };

  // ---- Python (browser.py) in a worker, which is loaded by the first call

  const MAX_SECONDS = 30; // for an answer, once Python is loaded
  let worker = null, stop = null; // stop(reason): ends the running call, and the worker with it
  const callPython = (name, ...values) => new Promise((resolve, reject) => {
    stop?.("another function was run");
    worker ??= new Worker(new URL("python_worker.js", ADDRESS));
    let timer = null;
    const end = () => (clearTimeout(timer), (stop = null));
    stop = reason => (end(), worker.terminate(), (worker = null), reject(new Error(reason)));
    worker.onerror = ({ message }) => stop(message || "Python could not be loaded");
    worker.onmessage = ({ data }) => {
      if (data.isReady) return (timer = setTimeout(stop, 1000 * MAX_SECONDS, `no answer within ${MAX_SECONDS} seconds: the function does not end`));
      end();
      "error" in data ? reject(new Error(data.error)) : resolve(JSON.parse(data.value));
    };
    worker.postMessage([name, values]);
  });
  /* A field for code, which the browser keeps, and a button that calls run(code) and shows an error's text. */
  const editor = (name, label, code, run) => {
    const kept = `nanoinfer ${name}`;
    const area = make("textarea", { spellcheck: "false", "aria-label": label, oninput: () => (localStorage[kept] = area.value) });
    area.value = localStorage[kept] ?? code;
    area.rows = area.value.split("\n").length + 4;
    const said = make("pre", { role: "status" });
    const start = button("Run", async () => {
      start.disabled = true;
      said.textContent = worker ? "Running ..." : "Loading Python, 12 MB once ...";
      said.textContent = await run(area.value).catch(error => error.message);
      start.disabled = false;
    });
    const reset = button("Begin anew", () => ((area.value = code), delete localStorage[kept]));
    return make("div", {}, area, make("p", {}, start, reset), said);
  };

  // ---- the tasks of `nanoinfer learn` that need no tensors

  const tasks = (figure, { tasks }) => {
    const kept = name => `nanoinfer passed ${name}`;
    const list = make("ol", { class: "tasks" }), page = make("div"), count = words();
    const items = (texts, tag) => make("ul", {}, ...texts.map(text => make("li", {}, make(tag, {}, text))));
    const showList = chosen => {
      list.replaceChildren(...tasks.map(one => {
        const passed = localStorage[kept(one.name)], text = `${passed ? "✓ " : ""}${one.name}: ${one.title} (${one.minutes} min)`;
        const choose = make("button", { type: "button", class: passed ? "passed" : "", "aria-current": one === chosen, onclick: () => show(one) }, text);
        return make("li", {}, choose);
      }));
      count.textContent = `${tasks.filter(one => localStorage[kept(one.name)]).length} of ${tasks.length} passed.`;
    };
    const show = task => {
      const { name, role, about, rules, places, lesson, code, hints } = task;
      const check = async source => {
        const said = await callPython("check_task", name, source);
        said === "passed" ? (localStorage[kept(name)] = "yes") : delete localStorage[kept(name)];
        showList(task);
        return said;
      };
      page.replaceChildren(
        make("h2", {}, `${name}: ${task.title}`), make("p", {}, role), make("p", {}, about),
        make("p", {}, "What is checked:"), items(rules, "span"),
        ...places.flatMap(([place, declarations]) => [make("p", {}, `You have, of ${place}:`), items(declarations, "code")]),
        make("p", {}, lesson), editor(name, `Your ${name}`, code, check),
        ...hints.map((text, i) => make("details", {}, make("summary", {}, `Hint ${i + 1}`), text)));
      showList(task);
    };
    figure.replaceChildren(count, list, page);
    show(tasks.find(one => !localStorage[kept(one.name)]) ?? tasks[0]);
  };

  // ---- the scheduler game

  const game = (figure, { choices, usual, limits, traces, order }) => {
    const best = trace => Math.max(...trace.outcomes.map(one => one.goodput)), mine = traces.map(() => null);
    const indexOf = values => values.reduce((index, value, i) => index * choices[i].values.length + value, 0);
    const valuesOf = index => choices.map((_, i) => Math.floor(index / choices.slice(i + 1).reduce((n, one) => n * one.values.length, 1)) % choices[i].values.length);
    const show = (trace, outcome) => {
      status.textContent = `${outcome.goodput.toFixed(2)} good requests per second: ${outcome.good} of ${trace.requests.length} kept their limits, in ${(outcome.ms / 1000).toFixed(2)} s. `
        + `Best of the ${trace.of.length} choices: ${best(trace).toFixed(2)}. ${outcome.preemptions} preemptions, at most ${outcome.atOnce} sequences in a step.`;
      picture.replaceChildren(timeline(trace, outcome), table(trace, outcome));
    };
    const play = (index, outcome) => {
      mine[index] = Math.max(mine[index] ?? 0, outcome.goodput);
      scores.replaceChildren(...traces.map((one, i) => make("li", {}, `${one.name}: ${mine[i] !== null ? `${percent(mine[i] / best(one))} of the best` : "not played"}`)));
      show(traces[index], outcome);
    };
    const chosen = () => {
      const trace = traces[which.read()];
      return trace.outcomes[trace.of[indexOf(selects.map(one => one.read()))]];
    };
    const showBest = () => {
      const trace = traces[which.read()], index = trace.of.findIndex(one => trace.outcomes[one].goodput === best(trace));
      valuesOf(index).forEach((value, i) => selects[i].write(value));
      show(trace, chosen());
    };
    const playOwn = async code => {
      const index = which.read();
      play(index, await callPython("play_own_order", code, index, ...selects.map(one => one.read())));
      return "The timeline above is that of your order, with your other choices.";
    };
    const which = choice("Trace", traces.map(one => one.name), 0, () => (describe(), picture.replaceChildren(), (status.textContent = "")));
    const describe = () => (about.textContent = `${traces[which.read()].words} ${traces[which.read()].blocks} blocks of ${limits.blockSize} tokens.`);
    const selects = choices.map((one, i) => choice(one.label, one.values, usual[i], () => {}));
    const about = make("p"), status = words(), picture = make("div"), scores = make("ul");
    const own = make("details", {}, make("summary", {}, "Write the order yourself"), editor("order", "Your order_waiting", order, playOwn));
    figure.replaceChildren(which.element, about, ...selects.map(one => one.element),
      make("p", {}, button("Run", () => play(which.read(), chosen())), " ", button("Show the best", showBest)), status, picture, scores, own);
    describe();
  };
  const KINDS = [["waits", "waits"], ["reads", "reads its prompt"], ["writes", "writes"]]; // classes and words
  const fate = ([, , , first, pause], [took, gap]) => [took <= first, gap <= pause];
  const timeline = (trace, outcome) => {
    const row = 16, width = 640, x = ms => 44 + ((width - 100) * ms) / outcome.ms, height = row * trace.requests.length + 24;
    const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Timeline of the requests. The table below has its figures." });
    trace.requests.forEach((request, i) => {
      const [, , spans] = outcome.requests[i], y = row * i + 4, [inTime, steady] = fate(request, outcome.requests[i]);
      picture.append(make("text", { x: 36, y: y + 10, "text-anchor": "end" }, `${i + 1}`));
      spans.slice(0, -1).forEach(([from, kind], j) => picture.append(make("rect", {
        x: x(from), y, width: Math.max(x(spans[j + 1][0]) - x(from), 1), height: row - 4, class: KINDS[kind][0] }, make("title", {}, `${KINDS[kind][1]} from ${from} to ${spans[j + 1][0]} ms`))));
      picture.append(make("line", { x1: x(request[0] + request[3]), x2: x(request[0] + request[3]), y1: y - 1, y2: y + row - 3, class: "limit" }));
      picture.append(make("text", { x: x(spans.at(-1)[0]) + 4, y: y + 10, class: inTime && steady ? "" : "bad" }, inTime ? (steady ? "✓" : "✗ pause") : "✗ late"));
    });
    picture.append(make("text", { x: 44, y: height - 4 }, "0 s"), make("text", { x: width - 56, y: height - 4, "text-anchor": "end" }, `${(outcome.ms / 1000).toFixed(2)} s`));
    const key = make("p", { class: "key" }, ...KINDS.flatMap(([kind, text]) => [make("i", { class: kind }), ` ${text} `]), make("i", { class: "limit" }), " its first token is late after this. ✗ pause: two tokens came too far apart");
    return make("div", {}, make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Timeline" }, picture), key);
  };
  const table = (trace, outcome) => {
    const cell = (value, limit) => make("td", value > limit ? { class: "bad" } : {}, `${value} of ${limit}${value > limit ? " ✗" : ""}`);
    const rows = trace.requests.map((request, i) => make("tr", {}, ...[i + 1, request[1], request[2], request[5]].map(one => make("td", {}, `${one}`)),
      cell(outcome.requests[i][0], request[3]), cell(outcome.requests[i][1], request[4])));
    const head = ["request", "prompt", "answer", "priority", "first token, ms", "longest pause, ms"].map(one => make("th", { scope: "col" }, one));
    return make("details", {}, make("summary", {}, "Every request"), make("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Every request" }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))));
  };

  // ---- start

  const STARTS = { sampler, calculator, predict, replay, tasks, game };
  for (const figure of document.querySelectorAll("figure.interactive")) {
    const data = figure.querySelector("script");
    STARTS[figure.dataset.kind](figure, data && JSON.parse(data.textContent));
    figure.classList.add("alive");
  }
  return { sample, formulas };
})();
