// The plots of a page of plans. Their values are in the tables of the page.

// In stacked bars the kinds differ by pattern as well.
const KINDS = ["#2f7fd0", "#c2701a", "#2e8b57", "#9a5fc0", "#d0453f", "#8d93a0", "#b59a00", "#4aa3a2"];
const PATTERNS = ["", "/", "\\", "x", "-", "|", "+", "."];
const TALL = { height: 340, margin: { ...LAYOUT.margin, t: 60 } };

const valueTable = (caption, head, columns, rows) =>
  table(
    caption,
    [head, ...columns],
    rows.map(([name, values]) => [name, ...values.map(String)]),
  );

function bars(plan, { title, x, values, axis }) {
  const names = x.map(String);
  return figure({
    title,
    label: `${title}, ${plan.name}: ${plan.kinds.join(", ")}.`,
    traces: plan.kinds.map((kind, i) => ({
      x: names.map(plain),
      y: values[i],
      name: plain(kind),
      type: "bar",
      marker: {
        color: KINDS[i % KINDS.length],
        pattern: { shape: PATTERNS[i % PATTERNS.length], solidity: 0.25, fgcolor: "#ffffff", fillmode: "overlay" },
      },
      hovertemplate: `%{x}: %{y} ${plan.unit}`,
    })),
    values: valueTable(
      title,
      "kind",
      names,
      plan.kinds.map((kind, i) => [kind, values[i]]),
    ),
    layout: {
      ...TALL,
      barmode: "stack",
      xaxis: { ...AXIS, title: { text: axis }, type: "category" },
      yaxis: { ...AXIS, title: { text: plan.unit }, rangemode: "tozero" },
    },
  });
}

function trafficFigure(plan) {
  const title = "Sent by the rank in a step";
  const names = plan.worlds.map(String);
  const lines = [
    ["sent", plan.sent, RUNS.sharded],
    ["sent to other hosts", plan.across, RUNS.baseline],
  ];
  return figure({
    title,
    label: `${title} by the number of ranks, ${plan.name}.`,
    traces: lines.map(([name, values, look]) => ({
      x: names,
      y: values,
      name,
      mode: "lines+markers",
      type: "scatter",
      ...look,
      hovertemplate: `%{x} ranks: %{y} ${plan.unit}`,
    })),
    values: valueTable(
      title,
      "ranks",
      names,
      lines.map(([name, values]) => [name, values]),
    ),
    layout: {
      ...TALL,
      xaxis: { ...AXIS, title: { text: "ranks" }, type: "category" },
      yaxis: { ...AXIS, title: { text: plan.unit }, rangemode: "tozero" },
    },
  });
}

async function start() {
  const places = [...document.querySelectorAll(".plots")];
  const plans = JSON.parse(await unpack("data"));
  for (const [i, plan] of plans.entries()) {
    const figures = [
      bars(plan, {
        title: `Memory in each phase, ${plan.ranks} ranks`,
        x: plan.phases,
        values: plan.memory,
        axis: "phase",
      }),
      bars(plan, { title: "Peak by the number of ranks", x: plan.worlds, values: plan.peaks, axis: "ranks" }),
      trafficFigure(plan),
    ];
    clear(places[i], ...figures);
    for (const one of figures) await one.draw();
  }
  document.body.dataset.drawn = "plans"; // for the tests
}

start();
