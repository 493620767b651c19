// The three things to play with on play.md: the gate, the toy's film, the map of digits.
// Plain JavaScript, nothing is fetched; the stored runs are in play_data.js, which play.py writes.
"use strict";

const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#B59F00", "#8C6D46",
  "#555555", "#332288", "#AA4499"];

// HMOE, eqs. 2 to 4. A score is a function of the squared distance; "paper" is eq. 2.
const SCORES = {
  paper: (d2, eps) => -Math.log(d2 + eps),
  distance: d2 => -Math.sqrt(d2),
  square: d2 => -d2,
};
const sum = values => values.reduce((a, b) => a + b, 0);

function gateValues(v, embeddings, eps = 1e-6, kind = "paper") {
  const scores = embeddings.map(e => SCORES[kind](sum(e.map((x, i) => (x - v[i]) ** 2)), eps));
  const top = Math.max(...scores), weights = scores.map(s => Math.exp(s - top));
  return weights.map(w => w / sum(weights));
}
const entropy = p => -sum(p.map(x => x > 0 ? x * Math.log(x) : 0));
const load = rows => rows[0].map((_, k) => sum(rows.map(p => p[k])) / rows.length);
const entropyLoss = rows => sum(rows.map(entropy)) / rows.length;
const loadBalanceLoss = rows => Math.log(rows[0].length) - entropy(load(rows));

// Elements, controls and canvases.
function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "circle", "rect", "text"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function slider(label, low, high, step, value, said, changed) {
  const output = el("output", {}, said(value));
  const input = el("input", {type: "range", min: low, max: high, step, value, "aria-label": label});
  input.addEventListener("input", () => set(+input.value));
  function set(now) {
    input.value = now;
    output.textContent = said(now);
    input.setAttribute("aria-valuetext", said(now));
    changed(now);
  }
  return {element: el("label", {class: "play-slider"}, el("span", {}, label), input, output), set};
}

function choice(label, options, changed) {
  const select = el("select", {onchange: () => changed(select.value)},
    ...Object.entries(options).map(([value, text]) => el("option", {value}, text)));
  return el("label", {}, label, " ", select);
}

const button = (text, onclick) => el("button", {type: "button", onclick}, text);

// A canvas as wide as its place; `draw(context, width, height)` uses CSS pixels.
function canvas(label, ratio, draw) {
  const element = el("canvas", {role: "img", "aria-label": label});
  function redraw() {
    const width = element.clientWidth, height = ratio(width), dense = window.devicePixelRatio || 1;
    if (!width) return;
    element.style.height = `${height}px`;
    element.width = width * dense;
    element.height = height * dense;
    const context = element.getContext("2d");
    context.scale(dense, dense);
    context.font = "13px system-ui, sans-serif";
    draw(context, width, height);
  }
  new ResizeObserver(redraw).observe(element);
  return {element, redraw};
}

// 1. The gate: three embeddings and six codes in the plane.
const HALF = 4;  // the plane goes from -HALF to HALF
const CORNERS = [[-2.2, -1.3], [2.2, -1.3], [0, 2.5]];
const near = (e, side) => [e[0] + 0.3 * side, e[1] + 0.3];
const PRESETS = {
  "one clump for each expert": CORNERS.flatMap(e => [near(e, -1), near(e, 1)]),
  "all at one expert": [0, 1, 2, 3, 4, 5].map(i => [CORNERS[0][0] + 0.5 * Math.cos(i),
    CORNERS[0][1] + 0.5 * Math.sin(i)]),
  "all in the middle": [0, 1, 2, 3, 4, 5].map(i => [0.5 * Math.cos(i), 0.03 + 0.5 * Math.sin(i)]),
};

function gate(root) {
  const state = {eps: 1e-6, stretch: 1, kind: "paper", chosen: 0};
  const svg = el("svg", {viewBox: `${-HALF} ${-HALF} ${2 * HALF} ${2 * HALF}`});
  const shade = canvas("Each place in the colours of the experts that a code there would get",
    width => width, paint);
  const stretched = x => x.map(value => value * state.stretch);
  const gateAt = v => gateValues(stretched(v), state.e.map(stretched), state.eps, state.kind);

  function paint(context, width) {
    const cells = 60, size = width / cells;
    const rgb = COLOURS.slice(0, 3).map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
    for (let row = 0; row < cells; row++)
      for (let column = 0; column < cells; column++) {
        const at = i => ((i + 0.5) / cells * 2 - 1) * HALF;
        const p = gateAt([at(column), -at(row)]);
        const mixed = [0, 1, 2].map(i => 140 + 0.45 * sum(p.map((x, k) => x * rgb[k][i])));
        context.fillStyle = `rgb(${mixed.map(Math.round)})`;
        context.fillRect(column * size, row * size, size + 1, size + 1);
      }
  }

  const handles = [];
  function handle(point, name, isCode) {
    const mark = isCode ? el("circle", {r: 0.22, class: "play-code"}) : el("rect",
      {x: -0.22, y: -0.22, width: 0.44, height: 0.44, fill: COLOURS[+name[1] - 1]});
    const text = el("text", {y: isCode ? 0.11 : 0.62}, isCode ? name[1] : name);
    const g = el("g", {tabindex: 0, role: "button", class: "play-handle", "data-name": name},
      el("circle", {r: 0.4, fill: "transparent"}), mark, text);
    const move = (x, y) => {
      point[0] = Math.max(-HALF + 0.2, Math.min(HALF - 0.2, x));
      point[1] = Math.max(-HALF + 0.2, Math.min(HALF - 0.2, y));
      update(!isCode);
    };
    g.addEventListener("pointerdown", event => {
      g.setPointerCapture(event.pointerId);
      if (isCode) state.chosen = state.v.indexOf(point);
      update();
    });
    g.addEventListener("pointermove", event => {
      if (!g.hasPointerCapture(event.pointerId)) return;
      const box = svg.getBoundingClientRect();
      move(((event.clientX - box.left) / box.width * 2 - 1) * HALF,
        (1 - (event.clientY - box.top) / box.height * 2) * HALF);
    });
    g.addEventListener("focus", () => {
      if (isCode) state.chosen = state.v.indexOf(point);
      update();
    });
    g.addEventListener("keydown", event => {
      const step = {ArrowLeft: [-0.1, 0], ArrowRight: [0.1, 0], ArrowUp: [0, 0.1],
        ArrowDown: [0, -0.1]}[event.key];
      if (!step) return;
      event.preventDefault();
      move(point[0] + step[0], point[1] + step[1]);
    });
    svg.append(g);
    handles.push({g, point, name, isCode});
  }

  const numbers = el("div", {class: "play-numbers"});
  const bars = (title, p, symbol) => el("div", {}, el("strong", {}, title), ...p.map((x, k) =>
    el("div", {class: "play-bar"}, el("span", {}, symbol, el("sub", {}, `${k + 1}`)),
      el("span", {class: "play-track"},
        el("span", {style: `width: ${100 * x}%; background: ${COLOURS[k]}`})),
      el("output", {"data-value": `${symbol}${k + 1}`}, x.toFixed(3)))));
  const loss = (symbol, sub, words, value) => el("div", {class: "play-bar"},
    el("span", {}, symbol, el("sub", {}, sub)), el("span", {}, words),
    el("output", {"data-value": `L_${sub}`}, value.toFixed(3)));

  function update(repaint) {
    for (const {g, point, name, isCode} of handles) {
      g.setAttribute("transform", `translate(${point[0]} ${-point[1]})`);
      g.setAttribute("aria-label", `${isCode ? "code" : "embedding"} ${name} at `
        + point.map(x => x.toFixed(1)).join(", "));
      g.classList.toggle("chosen", isCode && state.v.indexOf(point) === state.chosen);
    }
    const rows = state.v.map(gateAt);
    numbers.replaceChildren(
      bars(`Gate values of code ${state.chosen + 1}`, rows[state.chosen], "p"),
      bars("Load: the mean over the six codes", load(rows), "P"),
      el("div", {}, el("strong", {}, `Losses, between 0 and log 3 = ${Math.log(3).toFixed(3)}`),
        loss("L", "en", "each code decided?", entropyLoss(rows)),
        loss("L", "kl", "all experts used?", loadBalanceLoss(rows))));
    if (repaint) shade.redraw();
  }

  function preset(name) {
    state.e = CORNERS.map(e => [...e]);
    state.v = PRESETS[name].map(v => [...v]);
    state.chosen = 0;
    svg.replaceChildren();
    handles.length = 0;
    state.e.forEach((e, k) => handle(e, `e${k + 1}`, false));
    state.v.forEach((v, i) => handle(v, `v${i + 1}`, true));
    update(true);
  }

  const power = x => 10 ** x;
  const eps = slider("ε", -6, 2, 0.5, -6, x => power(x).toPrecision(1), x => {
    state.eps = power(x);
    update(true);
  });
  const stretch = slider("stretch", -2, 2, 0.1, 0, x => `× ${+power(x).toPrecision(2)}`, x => {
    state.stretch = power(x);
    update(true);
  });
  const kinds = {paper: "eq. 2 of HMOE", distance: "softmax of −d", square: "softmax of −d²"};
  const kind = choice("Gate:", kinds, value => {
    state.kind = value;
    update(true);
  });
  root.replaceChildren(
    el("div", {class: "play-row"}, ...Object.keys(PRESETS).map(name =>
      button(name, () => preset(name)))),
    el("div", {class: "play-two"},
      el("div", {class: "play-plane"}, shade.element, svg),
      el("div", {}, el("div", {class: "play-row"}, kind), eps.element, stretch.element, numbers)));
  preset(Object.keys(PRESETS)[0]);
}

// 2. The film: the toy's seeds and epochs.
const bytes = text => Uint8Array.from(atob(text), c => c.charCodeAt(0));

function film(root, data) {
  const GRID = 121, K = 3, DASHES = [[], [7, 3], [2, 3]], marks = {};
  const state = {losses: Object.keys(data.runs)[0], seed: 0, epoch: 0, shown: false};
  for (const run of Object.values(data.runs))
    for (const name of ["experts", "gates"]) run[name] = bytes(run[name]);
  const run = () => data.runs[state.losses];
  const mine = () => marks[state.losses] ??= {};
  const picture = canvas("Outputs of three experts, and below them their gate values", width =>
    Math.min(420, 150 + 0.35 * width), paint);

  function curves(context, values, x, y) {
    const begin = (state.seed * data.epochs.length + state.epoch) * GRID * K;
    for (let k = 0; k < K; k++) {
      context.strokeStyle = COLOURS[k];
      context.lineWidth = 2;
      context.setLineDash(DASHES[k]);
      context.beginPath();
      for (let i = 0, pen = "moveTo"; i < GRID; i++) {
        const value = values[begin + i * K + k], outside = values === run().experts
          && (value === 0 || value === 255);  // of the picture: the line is interrupted
        context[pen](x(data.ends[0] + (data.ends[1] - data.ends[0]) * i / (GRID - 1)),
          y(value / 255));
        pen = outside ? "moveTo" : "lineTo";
      }
      context.stroke();
    }
    context.setLineDash([]);
  }

  function paint(context, width, height) {
    const left = 34, split = 0.6 * height, bottom = height - 22;
    const x = value => left + (width - left - 4) * (value - data.ends[0])
      / (data.ends[1] - data.ends[0]);
    const top = share => 8 + (split - 20) * (1 - share);
    const low = share => split + 4 + (bottom - split - 8) * (1 - share);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.fillStyle = "#eee";
    for (const begin of [0, 1, 2])
      context.fillRect(x(begin), 4, x(begin + 0.5) - x(begin), bottom - 4);
    context.fillStyle = "#222";
    for (const value of [0, 1, 2]) context.fillText(`${value}`, x(value) - 4, height - 6);
    context.fillText("x", width - 14, height - 6);
    for (const [value, share] of [["2", 1], ["yₖ", 0.5], ["−2", 0]])
      context.fillText(value, 6, top(share) + 5);
    for (const [value, share] of [["1", 1], ["pₖ", 0.5], ["0", 0]])
      context.fillText(value, 6, low(share) + 5);
    context.strokeStyle = "#999";
    context.strokeRect(x(data.ends[0]), split - 4, width, 0);
    curves(context, run().experts, x, top);
    curves(context, run().gates, x, low);
    context.fillStyle = "#000";
    for (const [px, py] of data.points) {
      context.beginPath();
      context.arc(x(px), top((py / data.cut + 1) / 2), 2, 0, 7);
      context.fill();
    }
  }

  const strip = el("div", {class: "play-strip"}), tally = el("p", {"aria-live": "polite"});
  function update() {
    const own = mine(), judged = Object.keys(own).length, yes = sum(Object.values(own));
    strip.replaceChildren(...run().seeds.map((seed, i) => el("button", {
      type: "button", onclick: () => seeds.set(i), "aria-label": `seed ${seed}`
        + (i in own ? `: ${own[i] ? "found" : "not found"}` : ""),
      class: `${i === state.seed ? "chosen" : ""} ${i in own ? own[i] ? "yes" : "no" : ""}`,
    }, i in own ? own[i] ? "✓" : "✗" : `${seed}`)));
    let text = `You: ${yes} found of ${judged} judged, of ${run().seeds.length} seeds.`;
    if (state.shown) {
      const other = Object.keys(own).filter(i => own[i] !== run().found[i]).map(i =>
        `${run().seeds[i]} (the rule: ${run().found[i] ? "found" : run().majority[i]
          ? "by majority only" : "not found"})`);
      text += ` The rule of the page of Fig. 3: ${sum(run().found)} of ${run().seeds.length}.`
        + (judged ? ` You differ from it in ${other.length} of ${judged}`
          + `${other.length ? `: seed ${other.join(", ")}` : ""}.` : "");
    }
    tally.textContent = text;
    picture.redraw();
  }
  function judge(found) {
    mine()[state.seed] = found;
    seeds.set((state.seed + 1) % run().seeds.length);
  }

  let seeds, playing = 0;
  const last = data.epochs.length - 1;
  const epochs = slider("epoch", 0, last, 1, last, i => data.epochs[i].toLocaleString("en"), i => {
    state.epoch = i;
    update();
  });
  const seedPlace = el("div");
  function seedSlider() {
    state.seed = 0;
    seeds = slider("seed", 0, run().seeds.length - 1, 1, 0, i => `${run().seeds[i]}`, i => {
      state.seed = i;
      update();
    });
    seedPlace.replaceChildren(seeds.element);
  }
  const play = button("▶ play the epochs", () => {
    clearInterval(playing);
    let i = 0;
    epochs.set(i);
    playing = setInterval(() => i < last ? epochs.set(++i) : clearInterval(playing), 700);
  });
  const names = Object.fromEntries(Object.keys(data.runs).map(name => [name, name]));
  root.replaceChildren(
    el("div", {class: "play-row"}, choice("Trained with:", names, value => {
      state.losses = value;
      seedSlider();
      update();
    }), play),
    seedPlace, epochs.element, picture.element,
    el("p", {class: "play-legend"}, ...["expert 1", "expert 2 (dashed)", "expert 3 (dotted)"].map(
      (name, k) => el("span", {}, el("i", {style: `background: ${COLOURS[k]}`}), name))),
    el("div", {class: "play-row"}, button("✓ found", () => judge(1)),
      button("✗ not found", () => judge(0)), button("compare with the rule", () => {
        state.shown = true;
        update();
      })), tally, strip);
  state.epoch = last;
  seedSlider();
  update();
}

// 3. The map: codes of digits, placed by t-SNE.
function digits(root, data) {
  const sheet = new Image(), state = {run: 0, by: "domain", at: -1};
  const run = () => data.runs[state.run], best = p => p.indexOf(Math.max(...p));
  const values = {
    domain: i => data.domains[run().domain[i]],
    class: i => `digit ${run().class[i]}`,
    expert: i => `expert ${best(run().gates[i]) + 1}`,
    kmeans: i => i < run().known ? `k-means group ${run().kmeans[i] + 1}` : "",
  };
  const factor = {domain: "domain", class: "class", expert: "expert", kmeans: "k-means"};
  const legend = el("p", {class: "play-legend"}), scores = el("p");
  const words = el("p", {"aria-live": "polite"}), image = el("canvas", {width: 128, height: 128,
    class: "play-image", role: "img", "aria-label": "The image of the code"});
  const picture = canvas("Codes of images; arrow keys go from code to code", width =>
    Math.min(width, 460), paint);
  let place = null;

  function colours() {
    const shown = run().places.map((_, i) => values[state.by](i)).slice(0, run().known);
    const names = state.by === "domain" ? data.domains : [...new Set(shown)].sort();
    return Object.fromEntries(names.map((name, i) => [name, COLOURS[i]])
      .filter(([name]) => shown.includes(name)));
  }

  function paint(context, width, height) {
    const all = [...run().places, ...run().embeddings];
    const [xs, ys] = [0, 1].map(i => all.map(point => point[i]));
    const scale = (list, size) => value => 16 + (size - 32) * (value - Math.min(...list))
      / (Math.max(...list) - Math.min(...list));
    const [x, y] = [scale(xs, width), scale(ys, height)], palette = colours();
    place = run().places.map(([px, py]) => [x(px), height - y(py)]);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    place.forEach(([px, py], i) => {
      context.fillStyle = i < run().known ? palette[values[state.by](i)] : "#000";
      context.beginPath();
      if (i < run().known) context.arc(px, py, 4, 0, 7);
      else for (const [dx, dy] of [[-5, 4], [5, 4], [0, -6]]) context.lineTo(px + dx, py + dy);
      context.fill();
    });
    context.fillStyle = "#fff";
    context.strokeStyle = "#000";
    context.lineWidth = 2;
    for (const [px, py] of run().embeddings) {
      context.fillRect(x(px) - 6, height - y(py) - 6, 12, 12);
      context.strokeRect(x(px) - 6, height - y(py) - 6, 12, 12);
    }
    if (state.at < 0) return;
    context.beginPath();
    context.arc(...place[state.at], 8, 0, 7);
    context.stroke();
  }

  function show(i) {
    state.at = i;
    picture.redraw();
    const context = image.getContext("2d"), side = data.side;
    context.fillStyle = "#fff";
    context.fillRect(0, 0, 128, 128);
    if (i < 0) return words.replaceChildren("Point at a code, or touch it.");
    const tile = run().tile[i], column = tile % data.columns, row = Math.floor(tile / data.columns);
    context.imageSmoothingEnabled = false;
    context.drawImage(sheet, column * (side + 1), row * (side + 1), side, side, 0, 0, 128, 128);
    const said = Object.keys(values).map(by => values[by](i)).filter(Boolean);
    words.replaceChildren(`${i < run().known ? "" : "Of the test domain: "}${said.join(", ")}; `
      + `gate values ${run().gates[i].map(p => p.toFixed(2)).join(", ")}.`);
  }

  function update() {
    legend.replaceChildren(...Object.entries(colours()).map(([name, colour]) =>
      el("span", {}, el("i", {style: `background: ${colour}`}), name)),
    el("span", {}, el("i", {class: "square"}), "embeddings of the experts"),
    el("span", {}, el("i", {class: "triangle"}), `test domain: ${run().test}`));
    const {domain, class: label, kmeans} = run().nmi;
    scores.textContent = `NMI of experts and domains ${domain.toFixed(2)}; of experts and classes `
      + `${label.toFixed(2)}; of k-means and domains ${kmeans.toFixed(2)}.`;
    show(-1);
  }

  function nearest(event) {
    const box = picture.element.getBoundingClientRect();
    const away = place.map(([x, y]) =>
      Math.hypot(x - event.clientX + box.left, y - event.clientY + box.top));
    const i = away.indexOf(Math.min(...away));
    if (away[i] < 20 && i !== state.at) show(i);
  }
  picture.element.tabIndex = 0;
  for (const kind of ["pointermove", "pointerdown"])
    picture.element.addEventListener(kind, nearest);
  picture.element.addEventListener("keydown", event => {
    const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
    if (!step) return;
    event.preventDefault();
    show((state.at + step + place.length) % place.length);
  });
  const runs = data.runs.map((r, i) => [i, `${r.test} held out: `
    + `${r.nmi.domain >= 0.9 ? "found" : "not found"} (NMI ${r.nmi.domain.toFixed(2)})`]);
  sheet.src = data.sheet;
  root.replaceChildren(
    el("div", {class: "play-row"}, choice("Run:", Object.fromEntries(runs), value => {
      state.run = +value;
      update();
    }), choice("Colour:", factor, value => {
      state.by = value;
      update();
    })),
    el("div", {class: "play-two wide"}, picture.element, el("div", {}, image, words, scores)),
    legend);
  update();
}

if (typeof module !== "undefined") module.exports = {gateValues, entropyLoss, loadBalanceLoss};
else document.addEventListener("DOMContentLoaded", () => {
  const place = name => document.getElementById(`play-${name}`);
  gate(place("gate"));
  film(place("film"), PLAY_DATA.film);
  digits(place("map"), PLAY_DATA.maps);
});
