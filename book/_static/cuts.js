// What the seven cuts of a table cost in one step: the formulas of tutorec.distributed.planner.cost, for a reader without
// Python. tests/book/test_cuts.py holds every number equal to the library's. Bandwidths are bytes per millisecond.
"use strict";
(() => {
  const GIB = 2 ** 30 / 1000, GB = 1e6;
  const MACHINES = {
    "H100": { memory: 3350 * GB, inside: 450 * GB, across: 50 * GB, latency: 0.02, row: 0, backward: 2 },
    "A100-80": { memory: 2039 * GB, inside: 300 * GB, across: 25 * GB, latency: 0.02, row: 0, backward: 2 },
    "laptop": { memory: 4.8 * GIB, inside: 0.9 * GIB, across: 0.9 * GIB, latency: 0.4, row: 230e-6, backward: 2.5 },
  };
  const CUTS = ["data-parallel", "table-wise", "column-wise", "table-column-wise", "row-wise", "table-row-wise", "grid"];
  const LEAST_COLUMNS = 32, LEAST_ROW = 128, ID = 8, FLOAT = 4, PASSES = 5;

  // Work of the holder of r rows and d columns: ids and rows read, ids updated, gradients, table gradient, wire [inside, across].
  function workOf(cut, x, r, d) {
    const W = x.ranks, H = x.hosts, L = W / H, S = x.batch, N = S * x.bag, id = x.rows < 2 ** 31 ? 4 : 8;
    const toAll = (bytes) => [(L - 1) * bytes, (W - L) * bytes];
    if (cut === "data-parallel") {
      const whole = x.rows * x.columns, batch = id * N + FLOAT * S * x.columns;
      const summed = W * (batch + FLOAT * S) > 2 * FLOAT * whole;
      if (summed) return { reads: N, bags: S, updates: N, gradients: S, table: whole, legs: [toAll(2 * FLOAT * whole / W)] };
      return { reads: N, bags: S, updates: W * N, gradients: W * S, table: 0, twice: 1, legs: [toAll(batch + id * S)] };
    }
    const n = N * r / x.rows, rows = FLOAT * S * d;
    const twice = cut === "table-row-wise" || cut === "grid" ? [[H * (L - 1) * rows, 0], [0, (H - 1) * rows]] : [toAll(rows)];
    return { reads: W * n, bags: W * S, updates: W * n, gradients: W * S, table: 0, legs: [toAll(id * (S + n)), ...twice, ...twice] };
  }

  function msOf(machine, work, r, d) {
    const row = ID + Math.max(FLOAT * d, LEAST_ROW);
    const forward = work.reads * row + FLOAT * work.bags * d;
    const backward = (machine.backward + (work.twice || 0)) * (work.updates * row + FLOAT * work.gradients * d) + PASSES * FLOAT * work.table;
    const distinct = r > 1 ? -r * Math.expm1(work.updates * Math.log1p(-1 / r)) : Math.min(work.updates, r);
    const wire = work.legs.reduce((sum, [inside, across]) => sum + Math.max(inside / machine.inside, across / machine.across), 0);
    return (forward + backward) / machine.memory + machine.row * distinct + wire;
  }

  // The pieces of a table: [rank, rows, columns].
  function piecesOf(cut, x) {
    const W = x.ranks, H = x.hosts, L = W / H, byColumns = cut.includes("column") || cut === "grid";
    const slices = byColumns ? Math.max(1, x.columns / LEAST_COLUMNS) : 1;
    const parts = cut === "row-wise" ? W : cut === "table-row-wise" || cut === "grid" ? L : 1;
    if (cut === "data-parallel") return Array.from({ length: W }, (_, rank) => [rank, x.rows, x.columns]);
    const each = Math.ceil(x.rows / parts), found = [];
    for (let slice = 0; slice < slices; slice++) {
      for (let part = 0; part < parts; part++) {
        const rank = cut === "grid" ? (slice % H) * L + part : cut === "table-column-wise" ? slice % L : (slice + part) % W;
        const start = Math.min(part * each, x.rows);
        found.push([rank, Math.min(start + each, x.rows) - start, x.columns / slices]);
      }
    }
    return found;
  }

  function exchangesOf(cut, x) {
    if (cut === "data-parallel") return 3;
    return cut === "table-row-wise" || cut === "grid" ? 2 + 2 * ((x.ranks > x.hosts) + (x.hosts > 1)) : 4;
  }

  // x: {machine, ranks, hosts, batch, bag, rows, columns}; a line for each cut.
  function costs(x) {
    const machine = MACHINES[x.machine];
    return CUTS.map((cut) => {
      const ms = new Array(x.ranks).fill(0), held = new Array(x.ranks).fill(0);
      let bytes = 0, across = 0;
      for (const [rank, r, d] of piecesOf(cut, x)) {
        const work = workOf(cut, x, r, d);
        ms[rank] += msOf(machine, work, r, d);
        held[rank] += FLOAT * r * d;
        for (const leg of work.legs) { bytes += leg[0] + leg[1]; across += leg[1]; }
      }
      const exchanges = exchangesOf(cut, x), fixed = machine.latency * exchanges;
      const mean = ms.reduce((a, b) => a + b) / x.ranks + fixed;
      return { cut, bytes, across, exchanges, ms: Math.max(...ms) + fixed, mean, held: Math.max(...held) };
    });
  }

  const START = { machine: "H100", ranks: 64, hosts: 8, batch: 4096, bag: 10, rows: 1e7, columns: 128 };
  const HEADER = ["cut", "bytes, all ranks", "exchanges", "time, busiest rank", "weights, fullest rank"];

  if (typeof module !== "undefined") { module.exports = { costs, START, HEADER }; return; }

  const steps = (first, last) => Array.from({ length: last - first + 1 }, (_, k) => 2 ** (first + k));
  const decades = (last) => Array.from({ length: last * 3 + 1 }, (_, k) => [1, 2, 5][k % 3] * 10 ** Math.floor(k / 3));
  const SLIDERS = [
    ["ranks", "ranks", steps(1, 9)], ["hosts", "hosts", steps(0, 6)], ["batch", "samples of a rank", steps(4, 14)],
    ["bag", "ids in a bag, mean", decades(3)], ["rows", "rows", decades(10).slice(3)], ["columns", "columns", steps(2, 10)],
  ];
  const short = (value, units) => {
    let k = 0;
    while (value >= 999.5 && k < units.length - 1) { value /= 1000; k++; }
    return `${value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(value && value < 0.1 ? 3 : 2)} ${units[k]}`;
  };
  const size = (value) => (value ? short(value, ["B", "kB", "MB", "GB", "TB", "PB"]) : "0 B");
  const COLUMNS = [
    ["bytes", "across", size], ["exchanges", "exchanges", String], ["ms", "mean", (ms) => short(ms, ["ms", "s", "ks"])], ["held", "held", size],
  ];

  function start(place) {
    if (!place.querySelector("tbody")) {
      const head = HEADER.map((words) => `<th scope="col">${words}</th>`).join("");
      place.innerHTML = `<table class="no-scroll" aria-label="Costs of the seven cuts"><thead><tr>${head}</tr></thead><tbody></tbody></table>`;
    }
    const x = { ...START }, body = place.querySelector("tbody"), form = document.createElement("form");
    const pick = document.createElement("label"), machine = document.createElement("select"), inputs = {};
    for (const name of Object.keys(MACHINES)) machine.add(new Option(name, name));
    machine.value = x.machine;
    pick.append("machine", machine);
    form.append(pick);
    for (const [name, words, values] of SLIDERS) {
      const label = document.createElement("label"), input = document.createElement("input"), output = document.createElement("output");
      Object.assign(input, { type: "range", min: 0, max: values.length - 1, step: 1, value: values.indexOf(x[name]) });
      label.append(words, output, input);
      form.append(label);
      inputs[name] = { input, output, values };
    }
    const draw = () => {
      x.machine = machine.value;
      for (const [name, { input, output, values }] of Object.entries(inputs)) {
        if (name === "hosts") input.max = Math.min(values.length - 1, Math.log2(x.ranks));
        x[name] = values[input.value];
        output.value = x[name].toLocaleString("en");
        input.setAttribute("aria-valuetext", output.value);
      }
      const lines = costs(x);
      body.replaceChildren(...lines.map((line) => {
        const row = document.createElement("tr"), head = document.createElement("th");
        head.scope = "row";
        head.textContent = line.cut;
        row.append(head, ...COLUMNS.map(([name, part, text]) => {
          const all = lines.map((other) => other[name]), most = Math.max(...all) || 1, cell = document.createElement("td");
          const least = line[name] === Math.min(...all);
          cell.innerHTML = `<span class="${least ? "least" : ""}">${text(line[name])}</span><span class="bar" style="width:${100 * line[name] / most}%"><i style="width:${100 * line[part] / (line[name] || 1)}%"></i></span>`;
          return cell;
        }));
        return row;
      }));
    };
    form.addEventListener("input", draw);
    form.addEventListener("submit", (event) => event.preventDefault());
    place.prepend(form);
    draw();
  }
  addEventListener("DOMContentLoaded", () => document.querySelectorAll("div.cuts").forEach(start));
})();
