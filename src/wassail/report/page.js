// Adds to the page what paper cannot do: another order, another eps, labels that change, other people, another sorting,
// another theme.
// Everything it shows is recomputed from the sorted distances and radii, by the same arithmetic as wassail's RiskCurve.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const STEPS = 1000; // of the slider
  const GRID = 240; // places at which a curve is drawn, besides its bends
  const STRIP = 88; // pixels above the axes for the names of known shifts
  const ROOM = 13; // pixels between two of them
  const BENDS = 2000; // more bends than this are closer than a line is wide

  // ---- curves ----

  /** Base64 of little-endian float64 -> Float64Array. */
  function floats(text) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float64Array.from({ length: bytes.length / 8 }, (_, i) => view.getFloat64(8 * i, true));
  }

  /** How many of the sorted values lie below x, or at it. */
  function count(values, x, including) {
    let low = 0, high = values.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < x || (including && values[middle] === x)) low = middle + 1; else high = middle;
    }
    return low;
  }

  /** log(e^a + e^b). */
  function logAdd(a, b) {
    const top = Math.max(a, b);
    return top === -Infinity ? top : top + Math.log1p(Math.exp(Math.min(a, b) - top));
  }

  /** One side of a risk curve: sorted finite distances, their masses (null: all 1/n), the mass of all samples.
   *  lump: whether the last one stands for all samples whose label is cheaper to change than their input. */
  class Side {
    constructor(d, w, n, total, lump = false) {
      this.d = d;
      this.w = w;
      this.n = n;
      this.total = total;
      this.lump = lump;
      this.sums = [0];
      if (this.w) for (const w of this.w) this.sums.push(this.sums[this.sums.length - 1] + w);
      this.bends = new Map();
      this.under = [Infinity, this];
    }
    static of(packed, n, total) {
      const side = new Side(floats(packed.d), packed.w === null ? null : floats(packed.w), n, total);
      side.g = packed.g && floats(packed.g);
      return side;
    }
    isLump(k) { return this.lump && k === this.d.length - 1; }
    mass(k) { return this.lump && k === this.d.length ? this.total : this.w ? this.sums[k] : k / this.n; }
    weight(k) { return this.isLump(k) ? this.total - this.mass(k) : this.w ? this.w[k] : 1 / this.n; }
    /** The same where a changed label costs kappa: no move is dearer (THEORY 12). The last answer is kept. */
    capped(kappa) {
      if (this.under[0] === kappa) return this.under[1];
      const k = count(this.d, kappa, false), rest = this.total - this.mass(k);
      const d = new Float64Array(rest > 0 ? k + 1 : k), w = this.w && new Float64Array(d.length);
      d.set(this.d.subarray(0, k));
      if (w) w.set(this.w.subarray(0, k));
      if (rest > 0) d[k] = kappa;
      if (rest > 0 && w) w[k] = rest;
      this.under = [kappa, kappa === Infinity ? this : new Side(d, w, this.n, this.total, rest > 0)];
      return this.under[1];
    }
    /** The eps at which the first k + 1 samples are paid in full: (sum_i mu_i d_i^p)^(1/p), in logarithms. */
    paid(order) {
      if (order === Infinity) return this.d;
      if (!this.bends.has(order)) {
        let bill = -Infinity;
        const next = (d, k) => (bill = logAdd(bill, Math.log(this.weight(k)) + order * Math.log(d)));
        this.bends.set(order, this.d.map((d, k) => Math.exp(next(d, k) / order)));
      }
      return this.bends.get(order);
    }
    /** Accuracy at eps of the worst subpopulation of this share, and how far it may be too large by rounding. */
    accuracy(order, eps, certified, share = 1) {
      const d = this.d, paid = this.paid(order);
      eps *= share ** (1 / order);
      // Sets are closed: a flip at exactly eps counts, a radius of exactly eps protects.
      const k = count(paid, eps, !(certified && order === Infinity && eps > 0));
      let bought = this.mass(k);
      const whole = order === Infinity || k === d.length || eps === 0;
      if (!whole) {
        const part = (eps / d[k]) ** order - (k ? (paid[k - 1] / d[k]) ** order : 0);
        bought += Math.min(part, this.weight(k));
      }
      const exact = whole && !this.w && share === 1 && !(this.lump && k === d.length);
      const slack = exact ? 0 : (64 * (this.n + 16) * 2 ** -52 * Math.max(1, order === Infinity ? 1 : order)) / share;
      const left = exact ? (this.n - k) / this.n : (this.total * share - bought) / (this.total * share);
      return [Math.max(left, 0), slack];
    }
  }

  /** One side where the weights of groups may change within ranges (THEORY 12): the error of the worst weights is
   *  min over lam >= 0 of lam + max_w sum_g w_g h_g(lam), h_g(lam) = sum_{i in g} k_i (1 - lam (d_i / eps)^p)_+, where
   *  k_i fills a group with its nearest samples, each up to its weight within the group over alpha, to the mass 1. */
  class Grouped {
    constructor(side, groups, kappa, share, range) {
      const weight = groups.mass.map((mass) => mass / side.total), between = (end) => (v, g) => weight[g] + range * (groups[end][g] - v);
      this.low = weight.map(between("low"));
      this.span = weight.map(between("high")).map((high, g) => high - this.low[g]);
      this.near = groups.mass.map(() => []);
      this.held = groups.mass.map(() => [0]);
      const bought = groups.mass.map(() => 0);
      side.d.forEach((d, i) => {
        const g = side.g[i];
        if (d >= kappa) return;
        bought[g] += side.weight(i);
        this.near[g].push(d);
        this.held[g].push(Math.min(bought[g] / (groups.mass[g] * share), 1));
      });
      if (kappa < Infinity) this.near.forEach((near, g) => { near.push(kappa); this.held[g].push(1); });
      this.scale = Math.max(...this.near.map((near) => (near.length ? near[near.length - 1] : 0))) || 1;
      this.least = Math.min(...this.near.map((near) => near.find((d) => d > 0) ?? Infinity));
      this.bills = new Map();
    }
    /** The cost of the first 0, 1, ... samples of each group, in units of scale^p. */
    bill(order) {
      if (!this.bills.has(order)) this.bills.set(order, this.near.map((near, g) => {
        const sums = [0];
        near.forEach((d, i) => sums.push(sums[i] + (this.held[g][i + 1] - this.held[g][i]) * (d / this.scale) ** order));
        return sums;
      }));
      return this.bills.get(order);
    }
    /** The weights that win most, of equal ones the cheapest: what they win and cost. */
    greedy(wins, spent) {
      let left = Math.max(1 - this.low.reduce((a, b) => a + b, 0), 0), won = 0, cost = 0;
      for (const g of wins.map((_, g) => g).sort((a, b) => wins[b] - wins[a] || spent[a] - spent[b])) {
        const more = Math.min(left, this.span[g]), weight = this.low[g] + more;
        left -= more;
        won += weight * wins[g];
        cost += weight > 0 ? weight * spent[g] : 0;
      }
      return [won, cost];
    }
    /** Accuracy at eps, and how far it may be too large by rounding. */
    accuracy(order, eps, certified) {
      const none = this.near.map(() => 0);
      if (order === Infinity || eps === 0) {
        const reached = this.near.map((near, g) => this.held[g][count(near, eps, !(certified && eps > 0))]);
        return [Math.max(1 - this.greedy(reached, none)[0], 0), 2 ** -40];
      }
      const bill = this.bill(order), unit = (this.scale / eps) ** order;
      // A line of the dual at a multiplier: its value there and its slope.
      const line = (lam) => {
        const counts = this.near.map((near) => count(near, eps * lam ** (-1 / order), false));
        const spent = counts.map((k, g) => unit * bill[g][k]);
        const wins = counts.map((k, g) => Math.max(this.held[g][k] - (lam && lam * spent[g]), 0));
        const [won, cost] = this.greedy(wins, spent);
        return { lam, value: lam + won, slope: 1 - cost };
      };
      let a = line(0), b = line(Math.min(2 * (eps / this.least) ** order, 1e300)), best = Math.min(a.value, b.value);
      // The dual is convex and made of lines: the next multiplier is where the lines of both ends meet, or the middle.
      for (let step = 0; a.slope < 0 && step < 400 && b.lam - a.lam > 1e-15 * b.lam; step++) {
        const meet = (b.value - a.value + a.slope * a.lam - b.slope * b.lam) / (a.slope - b.slope);
        const lam = step % 3 < 2 && meet > a.lam && meet < b.lam ? meet : (a.lam + b.lam) / 2;
        const here = line(lam), floor = a.value + a.slope * (meet - a.lam);
        best = Math.min(best, here.value);
        if (best - floor <= 1e-14) break;
        if (here.slope < 0) a = here; else b = here;
      }
      return [Math.max(1 - best, 0), 2 ** -40];
    }
  }

  class Run {
    constructor(packed) {
      this.attacked = Side.of(packed.attacked, packed.n, packed.total);
      this.certified = packed.certified && Side.of(packed.certified, packed.n, packed.total);
      this.groups = packed.groups;
      this.kept = { key: "", sides: null };
    }
    /** Both sides where the weights of the groups use a part of their ranges. The last answer is kept. */
    grouped(kappa, share, range) {
      const key = [kappa, share, range].join();
      if (this.kept.key !== key) {
        const side = (one, price) => one && new Grouped(one, this.groups, price, share, range);
        this.kept = { key, sides: [side(this.certified, kappa * (1 - 2 ** -52)), side(this.attacked, kappa)] };
      }
      return this.kept.sides;
    }
    /** Both sides where a changed label costs kappa; a radius does not protect from a label that costs exactly eps. */
    sides(kappa, share = 1, range = 0) {
      if (range > 0) return this.grouped(kappa, share, range);
      return [this.certified && this.certified.capped(kappa * (1 - 2 ** -52)), this.attacked.capped(kappa)];
    }
    /** [certified, attacked]; certified is rounded down, and null if nothing is certified. */
    at(order, eps, kappa = Infinity, share = 1, range = 0) {
      const [below, above] = this.sides(kappa, share, range);
      const attacked = above.accuracy(order, eps, false, share)[0];
      if (!below) return [null, attacked];
      const [value, slack] = below.accuracy(order, eps, true, share);
      return [Math.min(Math.max(value - slack, 0), attacked), attacked];
    }
  }

  // ---- numbers as people read and write them ----

  const percent = (share) => `${(100 * share).toFixed(2)}\u00a0%`;
  // 2^-48 makes up for a count over N that was itself rounded down, and no more: 55 of 100 is not 54.99 %.
  const ceilPercent = (share) => `${(Math.max(Math.ceil(1e4 * (share - 2 ** -48)), 0) / 100).toFixed(2)}\u00a0%`;
  const floorPercent = (share) => `${(Math.floor(1e4 * (share + 2 ** -48)) / 100).toFixed(2)}\u00a0%`;

  function show(eps) {
    const steps = Math.round(255 * eps), digits = Number(eps.toPrecision(4));
    if (steps > 0 && steps < 255 && digits !== eps && Math.abs(steps / 255 - eps) <= 1e-12 * eps) return `${steps}/255`;
    return String(digits);
  }

  function parse(text) {
    const found = /^\s*(\d*\.?\d+(?:e[+-]?\d+)?|\d+\.)\s*(?:\/\s*(\d*\.?\d+(?:e[+-]?\d+)?))?\s*$/i.exec(text);
    const value = found ? Number(found[1]) / (found[2] === undefined ? 1 : Number(found[2])) : NaN;
    return Number.isFinite(value) ? value : NaN;
  }

  function ticks(end, unit) {
    const scale = unit || 1, span = end * scale;
    let step;
    if (unit) step = [1, 2, 4, 8, 16, 32, 64].find((s) => span / s <= 6) || 128;
    else {
      const power = 10 ** Math.floor(Math.log10(span / 5));
      step = [1, 2, 5, 10].map((s) => s * power).find((s) => span / s <= 6);
    }
    const places = Array.from({ length: Math.floor(span / step + 1e-9) + 1 }, (_, i) => i * step);
    return places.map((v) => [v / scale, v === 0 ? "0" : unit ? `${v}/${unit}` : String(Number(v.toPrecision(6)))]);
  }

  // ---- the sandwich ----

  function make(parent, name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  }

  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`).join("");

  /** The places of one side's line in the picture, from eps 0 to the end. */
  function trace(side, order, end, certified, share, px, py) {
    if (side instanceof Grouped) {
      const points = [];
      for (let i = 0; i <= GRID; i++) {
        const eps = (end * i) / GRID, y = py(side.accuracy(order, eps, certified)[0]);
        if (order === Infinity && i) points.push([px(eps), points[points.length - 1][1]]);
        points.push([px(eps), y]);
      }
      return points;
    }
    const stretch = share ** (1 / order), bends = stretch === 1 ? side.paid(order) : side.paid(order).map((eps) => eps / stretch);
    const value = (eps) => side.accuracy(order, eps, certified, share)[0];
    const whole = side.total * share;
    if (order === Infinity) {
      const points = [[px(0), py(value(0))]];
      const inside = count(bends, end, true);
      for (let k = 0; k < inside; k++) {
        const x = px(bends[k]);
        const later = k + 1 < inside && px(bends[k + 1]) - points[points.length - 1][0] < 0.4;
        if (later) continue; // the next drop is at the same place
        points.push([x, points[points.length - 1][1]], [x, py(Math.max(whole - side.mass(k + 1), 0) / whole)]);
      }
      points.push([px(end), points[points.length - 1][1]]);
      return points;
    }
    const inside = count(bends, end, true);
    const places = Array.from({ length: GRID + 1 }, (_, i) => (end * i) / GRID);
    if (inside <= BENDS) places.push(...bends.subarray(0, inside));
    places.sort((a, b) => a - b);
    return places.map((eps) => [px(eps), py(value(eps))]);
  }

  function plot(figure) {
    const data = JSON.parse(document.getElementById(figure.dataset.plot).textContent);
    const runs = data.runs.map((packed) => new Run(packed));
    const find = (selector) => figure.querySelector(selector);
    const canvas = find(".canvas"), slider = find('input[data-set="eps"]'), field = find('input[data-set="eps-text"]');
    const orders = [...figure.querySelectorAll('input[type="radio"]')];
    const ends = new Map(data.orders.map(([order, end]) => [Number(order), end])); // where the axis ends, for each order
    const state = { order: Number(data.order), eps: data.eps, kappa: Infinity, share: 1, range: 0, get end() { return ends.get(this.order); } };
    const alone = !data.overlay;
    let scale = null;

    function draw() {
      const width = Math.max(canvas.clientWidth, 240);
      const named = inside(), strip = named.length ? STRIP : 0; // names of shifts stand above the axes
      const height = Math.round(Math.min(Math.max(0.5 * width, 250), 430)) + strip;
      const box = { left: 46, right: width - 14, top: 12 + strip, bottom: height - 44 };
      const px = (eps) => box.left + ((box.right - box.left) * eps) / state.end;
      const py = (share) => box.bottom - (box.bottom - box.top) * share;
      scale = { box, width, px, py };
      const svg = document.createElementNS(SVG, "svg");
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.setAttribute("role", "img");
      svg.setAttribute("aria-label", canvas.dataset.label);
      for (const share of [0, 0.25, 0.5, 0.75, 1]) {
        make(svg, "line", { class: "rule", x1: box.left, x2: box.right, y1: py(share), y2: py(share) });
        make(svg, "text", { x: box.left - 8, y: py(share) + 4, "text-anchor": "end" }, `${100 * share}${share === 1 ? " %" : ""}`);
      }
      const marks = ticks(state.end, data.unit), every = Math.ceil(marks.length / (width / 75));
      marks.forEach(([eps, label], i) => {
        make(svg, "line", { class: "axis", x1: px(eps), x2: px(eps), y1: box.bottom, y2: box.bottom + 5 });
        if (i % every === 0) make(svg, "text", { x: px(eps), y: box.bottom + 19, "text-anchor": "middle" }, label);
      });
      make(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
      make(svg, "text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, `budget eps (ground norm l${data.norm})`);
      runs.forEach((run, i) => {
        const [proved, broken] = run.sides(state.kappa, state.share, state.range);
        const above = trace(broken, state.order, state.end, false, state.share, px, py);
        const below = proved && trace(proved, state.order, state.end, true, state.share, px, py);
        if (below && alone) {
          const floor = [[box.right, box.bottom], [box.left, box.bottom]];
          make(svg, "path", { class: "area certified", d: `${path([...below, ...floor])}Z` });
          make(svg, "path", { class: "area band", d: `${path([...above, ...below.slice().reverse()])}Z` });
        }
        const tone = alone ? "" : `run run-${i % 6} dash-${Math.floor(i / 6) % 4}`;
        if (below) make(svg, "path", { class: `line ${alone ? "certified" : `proved ${tone}`}`, d: path(below), "data-side": "certified" });
        make(svg, "path", { class: `line ${alone ? "attacked" : tone}`, d: path(above), "data-side": "attacked" });
      });
      landmarks(svg, named, box, px, py);
      make(svg, "g", { class: "here" });
      canvas.replaceChildren(svg);
      point();
    }

    /** The known shifts within the axes with their places, the nearest first. */
    function inside() {
      const key = orders.find((radio) => Number(radio.value) === state.order).value;
      const found = data.landmarks.filter((mark) => mark.eps[key] <= state.end).map((mark) => ({ ...mark, at: mark.eps[key] }));
      return found.sort((a, b) => a.at - b.at);
    }

    /** A mark for each known shift; its name stands above the axes, moved sideways where another one is. */
    function landmarks(svg, named, box, px, py) {
      const places = named.slice(0, Math.floor((box.right - box.left) / ROOM)).map((mark) => px(mark.at));
      places.forEach((x, i) => { if (i) places[i] = Math.max(x, places[i - 1] + ROOM); });
      for (let i = places.length - 1, limit = box.right; i >= 0; i--, limit = places[i + 1] - ROOM) places[i] = Math.min(places[i], limit);
      named.forEach((mark, i) => {
        const x = px(mark.at), y = py(mark.accuracy), label = places[i];
        if (label !== undefined) {
          make(svg, "line", { class: "rule", x1: label, x2: x, y1: box.top - 4, y2: y - 5 });
          const turned = `rotate(-90 ${label + 3} ${box.top - 7})`;
          make(svg, "text", { class: "landmark", x: label + 3, y: box.top - 7, transform: turned }, mark.name.slice(0, 16));
        }
        const shape = make(svg, "path", { class: "landmark", d: `M${x} ${y - 5}l5 5l-5 5l-5 -5Z` });
        make(shape, "title", {}, `${mark.name}: ${percent(mark.accuracy)} at eps ${show(mark.at)}`);
      });
    }

    /** The cursor at eps: a line, dots, and the figures below the plot. */
    function point() {
      const { box, width, px, py } = scale;
      const here = canvas.querySelector(".here"), inside = state.eps <= state.end;
      here.replaceChildren();
      const x = px(Math.min(state.eps, state.end));
      if (inside) make(here, "line", { class: "cursor", x1: x, x2: x, y1: box.top, y2: box.bottom });
      const spoken = [];
      runs.forEach((run, i) => {
        const [certified, attacked] = run.at(state.order, state.eps, state.kappa, state.share, state.range);
        const texts = { attacked: ceilPercent(attacked), certified: certified === null ? "–" : floorPercent(certified), gap: certified === null ? "–" : percent(attacked - certified) };
        const values = { attacked, certified, gap: certified === null ? null : attacked - certified };
        for (const element of figure.querySelectorAll(`[data-read^="${i}:"]`)) {
          const what = element.dataset.read.split(":")[1];
          element.textContent = texts[what];
          element.value = values[what] === null ? "" : String(values[what]);
        }
        spoken.push(`attacked ${texts.attacked}${certified === null ? "" : `, certified ${texts.certified}`}`);
        if (!inside) return;
        const right = x < width - 90;
        make(here, "circle", { class: `dot ${alone ? "attacked" : `run run-${i % 6}`}`, cx: x, cy: py(attacked), r: 5 });
        if (alone) make(here, "text", { class: "strong", x: x + (right ? 9 : -9), y: Math.max(py(attacked) - 8, 12), "text-anchor": right ? "start" : "end" }, texts.attacked);
        if (certified === null || !alone) return;
        const left = x > 110;
        make(here, "circle", { class: "dot certified", cx: x, cy: py(certified), r: 5 });
        if (py(certified) - py(attacked) > 12 || left)
          make(here, "text", { class: "strong", x: x + (left ? -9 : 9), y: Math.min(py(certified) + 17, box.bottom - 6), "text-anchor": left ? "end" : "start" }, texts.certified);
      });
      slider.setAttribute("aria-valuetext", `eps ${show(state.eps)}${alone ? `: ${spoken[0]}` : ""}`);
      for (const element of figure.querySelectorAll("[data-eps]")) element.textContent = show(state.eps);
      for (const element of figure.querySelectorAll("[data-meaning]")) element.hidden = Number(element.dataset.meaning) !== state.order;
    }

    function move(eps, source) {
      state.eps = eps;
      if (source !== slider) slider.value = String(Math.round((STEPS * Math.min(eps, state.end)) / state.end));
      if (source !== field) field.value = show(eps);
      field.removeAttribute("aria-invalid");
      point();
    }

    slider.addEventListener("input", () => move((state.end * Number(slider.value)) / STEPS, slider));
    field.addEventListener("input", () => {
      const eps = parse(field.value);
      if (Number.isNaN(eps)) field.setAttribute("aria-invalid", "true"); else move(eps, field);
    });
    field.addEventListener("change", () => move(state.eps, null));
    others(figure, state, draw);
    for (const radio of orders) radio.addEventListener("change", () => {
      state.order = Number(radio.value);
      draw();
      move(state.eps, null);
    });
    const drag = (event) => {
      if (event.type === "pointermove" && event.buttons === 0) return;
      const { box, width } = scale, bounds = canvas.getBoundingClientRect();
      const x = ((event.clientX - bounds.left) * width) / bounds.width;
      move((state.end * Math.min(Math.max(x - box.left, 0), box.right - box.left)) / (box.right - box.left), null);
    };
    canvas.addEventListener("pointerdown", drag);
    canvas.addEventListener("pointermove", drag);

    find(".live").hidden = false;
    find(".static").hidden = true;
    draw();
    move(state.eps, null);
    let last = canvas.clientWidth;
    new ResizeObserver(() => {
      if (canvas.clientWidth && canvas.clientWidth !== last) { last = canvas.clientWidth; draw(); }
    }).observe(canvas);
  }

  /** The price of a changed label, from 0 to twice the axis and then never, and the least share of people. */
  function others(figure, state, draw) {
    const set = (name, read, write, parsed) => {
      const slider = figure.querySelector(`input[data-set="${name}"]`), field = figure.querySelector(`input[data-set="${name}-text"]`);
      if (!slider || !field) return;
      const told = () => { field.value = write(state[name]); slider.setAttribute("aria-valuetext", field.value); };
      slider.addEventListener("input", () => { state[name] = read(Number(slider.value)); told(); draw(); });
      field.addEventListener("input", () => {
        const value = parsed(field.value);
        if (Number.isNaN(value)) { field.setAttribute("aria-invalid", "true"); return; }
        field.removeAttribute("aria-invalid");
        state[name] = value;
        slider.value = String(name !== "kappa" ? Math.round(STEPS * value) : Math.min(Math.round((STEPS * value) / (2 * state.end)), STEPS));
        draw();
      });
      field.addEventListener("change", told);
      told();
    };
    const never = (text) => (/^\s*(never|inf|∞)?\s*$/i.test(text) ? Infinity : parse(text));
    const price = (step) => (step >= STEPS ? Infinity : (2 * state.end * Math.max(step, 1)) / STEPS);
    set("kappa", price, (v) => (v === Infinity ? "never" : show(v)), (text) => { const v = never(text); return v > 0 ? v : NaN; });
    set("share", (step) => Math.max(step, 1) / STEPS, (v) => String(Number(v.toPrecision(4))), (text) => {
      const v = /%\s*$/.test(text) ? parse(text.replace("%", "")) / 100 : parse(text);
      return v > 0 && v <= 1 ? v : NaN;
    });
    set("range", (step) => step / STEPS, String, (text) => { const v = parse(text); return v <= 1 ? v : NaN; });
  }

  if (typeof document === "undefined") { // no page: the tests of the arithmetic
    globalThis.wassail = { Run };
    return;
  }

  // ---- tables and theme ----

  /** Numbers by value, text by the alphabet, and what is missing always last. */
  function sortable(table) {
    const heads = [...table.querySelectorAll("thead th:not([data-fixed])")], body = table.tBodies[0];
    for (const head of heads) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending", sign = up ? 1 : -1;
        for (const other of heads) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => row.cells[head.cellIndex].dataset.sort;
        const text = (row) => row.cells[head.cellIndex].textContent;
        body.append(...[...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          if (x === undefined) return sign * text(a).localeCompare(text(b), "en", { numeric: true });
          return x === "" || y === "" ? (x === "") - (y === "") : sign * (Number(x) - Number(y));
        }));
      });
    }
  }

  /** The button names the theme it leads to; until it is pressed the page follows the system. */
  function theme(button) {
    const system = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const label = () => { button.textContent = dark() ? "Light theme" : "Dark theme"; };
    button.hidden = false;
    label();
    system.addEventListener("change", label);
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      label();
    });
  }

  // On a phone a row of a table that is too wide is a card: every figure carries the head of its column.
  function stacked(table) {
    const frame = table.parentElement;
    if (frame.scrollWidth <= frame.clientWidth) return;
    const heads = [...table.querySelectorAll("thead th")].map((head) => [...(head.querySelector("button") ?? head).childNodes].map((part) => part.textContent.trim()).join(" "));
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, i) => { cell.dataset.head = heads[i] ?? ""; });
    table.classList.add("stacked");
  }

  document.querySelectorAll("figure[data-plot]").forEach(plot);
  document.querySelectorAll("table.sortable").forEach(sortable);
  const stack = () => narrow.matches && document.querySelectorAll("table.sortable").forEach(stacked);
  const narrow = matchMedia("(max-width: 44rem)");
  narrow.addEventListener("change", stack);
  stack();
  document.querySelectorAll("button.theme").forEach(theme);
})();
