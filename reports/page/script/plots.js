// The plots of a record. The plotting library is decoded and run when the first of them is drawn.

let plotting = null;

function loadPlotting() {
  plotting ||= unpack("plotting").then((source) => {
    // As an element and not by eval: the policy of the page allows this text by its hash, and no eval.
    document.head.append(el("script", {}, source));
    return window.Plotly;
  });
  return plotting;
}

// plotly reads marks such as <b> and <a> in its texts; of a run file's they are characters.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// Run files have strings in place of numbers that JSON lacks.
const finite = (value) => (typeof value === "number" ? value : null);

// Between the plots of several runs these differ by shape as well: of lines, dashes and widths, of points, symbols.
const RUNS = {
  oracle: { line: { color: "#8d93a0", width: 7 }, marker: { symbol: "square", size: 12, color: "#8d93a0" } },
  baseline: {
    line: { color: "#c2701a", width: 3, dash: "dash" },
    marker: { symbol: "diamond", size: 9, color: "#c2701a" },
  },
  sharded: { line: { color: "#2f7fd0", width: 1.5 }, marker: { symbol: "circle", size: 6, color: "#2f7fd0" } },
};
const OTHER_RUN = {
  line: { color: "#9a5fc0", width: 1.5, dash: "dot" },
  marker: { symbol: "cross", size: 7, color: "#9a5fc0" },
};
const ALLOWED = "#d0453f";

const LAYOUT = {
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  margin: { l: 62, r: 12, t: 30, b: 44 },
  height: 260,
  font: { family: "inherit", size: 12 },
  showlegend: true,
  legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
  hovermode: "closest",
  dragmode: false,
};
const CONFIG = { displayModeBar: false, responsive: true, scrollZoom: false };
const AXIS = { zeroline: false, automargin: true, fixedrange: true };

// A figure with a plot and, for those who do not see it, its values as a table. `width` is the least in pixels.
function figure({ title, label, traces, layout, values, notes = [], width = 0 }) {
  const place = el("div", { class: "plot", role: "img", "aria-label": `${label} The table below has the values.` });
  place.style.minWidth = `${width}px`;
  const made = el(
    "figure",
    { tabindex: -1 }, // a link may lead to it
    el("figcaption", {}, title),
    width ? scrolling(title, place) : place,
    notes.map((note) => el("p", { class: "note" }, note)),
    el("details", {}, el("summary", {}, "values"), scrolling(title, values)),
  );
  made.draw = async () => {
    const Plotly = await loadPlotting();
    if (place.isConnected) await Plotly.newPlot(place, traces, { ...LAYOUT, ...layout }, CONFIG);
  };
  return made;
}

const shownNumber = (value) => (value === null || value === undefined ? "" : String(value));

// A range of at least this share of the values: rounding errors alone should not fill the plot.
const LEAST_RANGE = 0.01;

function lossRange(values) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const margin = Math.max(
    (high - low) * 0.1,
    (Math.max(Math.abs(low), Math.abs(high)) * LEAST_RANGE - (high - low)) / 2,
    1e-12,
  );
  return values.length ? [low - margin, high + margin] : [0, 1];
}

function lossFigure(losses, where) {
  const order = Object.keys(RUNS);
  const names = Object.keys(losses)
    .filter((name) => losses[name].length)
    .toSorted((a, b) => (order.indexOf(a) + 1 || 9) - (order.indexOf(b) + 1 || 9));
  if (!names.length) return null;
  const steps = Math.max(...names.map((name) => losses[name].length));
  const numbers = Array.from({ length: steps }, (_, i) => i);
  const traces = names.map((name) => ({
    x: numbers,
    y: losses[name].map(finite),
    name: plain(name),
    mode: "lines+markers",
    type: "scatter",
    ...(RUNS[name] || OTHER_RUN),
    hovertemplate: "step %{x}: %{y}",
  }));
  const odd = names.flatMap((name) =>
    losses[name].flatMap((value, step) =>
      finite(value) === null ? [`The loss of ${name} in step ${step} is ${value}.`] : [],
    ),
  );
  const values = table(
    "Losses",
    ["step", ...names],
    numbers.map((step) => [String(step), ...names.map((name) => shownNumber(losses[name][step]))]),
  );
  return figure({
    title: "Loss",
    label: `Loss of each step, ${where}: ${names.join(", ")}.`,
    traces,
    values,
    notes: odd,
    layout: {
      xaxis: { ...AXIS, title: { text: "step" }, dtick: 1, range: [-0.3, steps - 0.7] },
      yaxis: {
        ...AXIS,
        title: { text: "loss" },
        range: lossRange(traces.flatMap((trace) => trace.y.filter((value) => value !== null))),
      },
    },
  });
}

// Distances that differ by orders of magnitude get a logarithmic axis, on which zero has the place of this value.
const ZERO = 0.1;
const SPREAD = 50;

function distanceFigure(distances, where) {
  if (!distances.length) return null;
  const sharded = distances.map(([, , , value]) => finite(value));
  const baseline = distances.map(([, , , , value]) => finite(value));
  const allowed = distances.map(([, , , , , value]) => finite(value));
  const logarithmic = Math.max(...sharded, ...baseline, 0) > SPREAD * Math.max(...allowed, 1);
  const placed = (values) => values.map((value) => (logarithmic && value !== null ? Math.max(value, ZERO) : value));
  const x = distances.map((_, i) => i);
  const texts = distances.map(
    ([stage, step, name, error, base, most]) =>
      plain(`step ${step}, ${stage}: ${name}`) +
      `<br>sharded ${plain(error)}, baseline ${plain(base ?? "-")}, allowed ${plain(most)} ulps`,
  );
  // Beside each other: where sharded run and baseline have the same bits, one would hide the other.
  const points = (name, y, marker, beside = 0) => ({
    x: x.map((i) => i + beside),
    y,
    name,
    mode: "markers",
    type: "scatter",
    cliponaxis: false,
    marker: { opacity: 1, ...marker },
    text: texts,
    hoverinfo: "text",
  });
  const over = distances.map(([, , , error, , most]) => isOver(error, most));
  const steps = distances.map(([, step]) => step);
  const firsts = x.filter((i) => i === 0 || steps[i] !== steps[i - 1]);
  const count = over.filter(Boolean).length;
  const notes = [];
  if (count) notes.push(`${plural(count, "distance")} above what is allowed, drawn as crosses.`);
  if (logarithmic) notes.push(`The axis is logarithmic; what is below ${ZERO} is drawn there.`);
  distances.forEach(([stage, step, name, error]) => {
    if (finite(error) === null) notes.push(`The distance of ${stage} of ${name} in step ${step} is ${error}.`);
  });
  const values = table(
    "Distances to the oracle in ulps",
    ["step", "stage", "tensor", "sharded", "baseline", "allowed"],
    distances.map(([stage, step, name, error, base, most], i) => [
      String(step),
      stage,
      name,
      over[i] ? el("strong", {}, `${error} (above)`) : String(error),
      shownNumber(base),
      String(most),
    ]),
  );
  return figure({
    title: "Distance to the oracle",
    label: `Distance to the oracle in ulps at each stage, ${where}: sharded run, baseline and what is allowed.`,
    traces: [
      points("allowed", placed(allowed), {
        symbol: "line-ew-open",
        size: 15,
        color: ALLOWED,
        line: { width: 2.5, color: ALLOWED },
      }),
      points("baseline", placed(baseline), { ...RUNS.baseline.marker, symbol: "diamond-open" }, -0.17),
      points(
        "sharded",
        placed(sharded),
        {
          ...RUNS.sharded.marker,
          symbol: over.map((is) => (is ? "x" : "circle")),
          size: over.map((is) => (is ? 11 : 7)),
        },
        0.17,
      ),
    ],
    values,
    notes,
    width: Math.max(0, distances.length * 17 + 80),
    layout: {
      height: 340,
      legend: { ...LAYOUT.legend, y: 1.09 }, // above the numbers of the steps
      xaxis: {
        ...AXIS,
        tickvals: x,
        ticktext: distances.map(([stage]) => plain(stage)),
        tickangle: -60,
        range: [-0.7, x.length - 0.3],
        showgrid: false,
      },
      yaxis: { ...AXIS, title: { text: "ulps" }, type: logarithmic ? "log" : "linear", rangemode: "tozero" },
      shapes: firsts.slice(1).map((i) => ({
        type: "line",
        x0: i - 0.5,
        x1: i - 0.5,
        y0: 0,
        y1: 1,
        yref: "paper",
        line: { color: "#8d93a0", width: 1, dash: "dot" },
      })),
      annotations: firsts.map((i) => ({
        x: i - 0.5,
        y: 1,
        yref: "paper",
        xanchor: "left",
        yanchor: "bottom",
        text: `step ${steps[i]}`,
        showarrow: false,
      })),
    },
  });
}

function isOver(error, most) {
  return typeof error === "number" ? typeof most === "number" && error > most : true;
}
