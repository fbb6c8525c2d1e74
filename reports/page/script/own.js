// What `shardproof check` found of the user's own training: factor, signature, and distances by module and step.

function ownPart(own, headed) {
  if (!own) return null;
  const mesh = Object.entries(own.mesh || {}).map(([name, size]) => `${name} ${size}`);
  const pairs = [
    ["model", own.model],
    ["mesh", mesh.join(", ")],
    ["data differ over", (own.data || []).join(", ")],
    ["gradients", own.factor === undefined ? "" : `${own.factor} x the reference's`],
    ["losses", own.loss_factor === undefined ? "" : `${own.loss_factor} x the reference's`],
    ["signature", own.signature],
    ["tensors compared", shown(own.compared)],
  ];
  const lines = own.lines || [];
  return el(
    "section",
    {},
    el("h4", {}, "Own training"),
    definitions(pairs),
    lines.length ? scrolling(`what diverges, ${headed}`, el("pre", {}, lines.join("\n"))) : null,
    (own.notes || []).map((note) => el("p", { class: "note" }, note)),
  );
}

// The distance of the first divergence: of its tensor, or of the module that has its tensor.
function divergenceOf(distances, failure) {
  if (!failure) return -1;
  const alike = (is) => distances.findIndex((one) => one[0] === failure.stage && one[1] === failure.step && is(one));
  const of = alike(([, , name]) => name === failure.name);
  return of < 0 ? alike(([, , , , , , module]) => module && `${failure.name}.`.startsWith(`${module}.`)) : of;
}

// Modules from left to right in the order of the run file; each point is a stage, as a share of what is allowed.
function moduleFigure(own, failure, where) {
  const distances = (own && own.distances) || [];
  if (!distances.length) return null;
  const modules = [...new Set(distances.map(([, , , , , , module]) => module))];
  const names = modules.map((module) => module || "(root)");
  const shares = distances.map(([, , , error, , most]) =>
    finite(error) === null ? null : Math.max(error / Math.max(finite(most) ?? 1, 1e-12), LEAST_SHARE),
  );
  const first = divergenceOf(distances, failure);
  const steps = [...new Set(distances.map(([, step]) => step))].toSorted((a, b) => a - b);
  // Steps of one module beside each other, so that growth from step to step is a slope.
  const at = distances.map(
    ([, step, , , , , module]) => modules.indexOf(module) + ((steps.indexOf(step) + 0.5) / steps.length - 0.5) * 0.7,
  );
  const traces = steps.map((step, number) => {
    const mine = distances.flatMap(([, of], i) => (of === step ? [i] : []));
    return {
      x: mine.map((i) => at[i]),
      y: mine.map((i) => shares[i]),
      name: `step ${step}`,
      mode: "markers",
      type: "scatter",
      cliponaxis: false,
      marker: {
        color: COLOURS[number % COLOURS.length],
        size: mine.map((i) => (isOver(distances[i][3], distances[i][5]) ? 11 : 7)),
        symbol: mine.map((i) => (isOver(distances[i][3], distances[i][5]) ? "x" : "circle")),
      },
      text: mine.map((i) => {
        const [stage, of, name, error, base, most, module] = distances[i];
        const numbers = `run ${error}, baseline ${base ?? "-"}, allowed ${most} ulps`;
        return plain(`step ${of}, ${stage}: ${name} in ${module || "(root)"}`) + `<br>${plain(numbers)}`;
      }),
      hoverinfo: "text",
    };
  });
  const notes = distances.flatMap(([stage, step, name, error]) =>
    finite(error) === null ? [`The distance of ${stage} of ${name} in step ${step} is ${error}.`] : [],
  );
  const values = table(
    "Distances by module in ulps",
    ["module", "step", "stage", "tensor", "run", "baseline", "allowed"],
    distances.map(([stage, step, name, error, base, most, module], i) => [
      i === first ? el("strong", {}, `${module || "(root)"} (diverges first)`) : module || "(root)",
      String(step),
      stage,
      name,
      isOver(error, most) ? el("strong", {}, `${error} (above)`) : String(error),
      shownNumber(base),
      String(most),
    ]),
  );
  return figure({
    title: "Distance to the reference by module and step",
    label: `Distances by module and step as shares of what is allowed, ${where}.`,
    traces,
    values,
    notes,
    width: modules.length * Math.max(24, steps.length * 12) + 80,
    layout: {
      height: 340,
      xaxis: {
        ...AXIS,
        tickvals: modules.map((_, i) => i),
        ticktext: names.map(plain),
        tickangle: -60,
        range: [-0.7, modules.length - 0.3],
        showgrid: false,
      },
      yaxis: { ...AXIS, title: { text: "share of what is allowed" }, type: "log" },
      shapes: [
        { type: "line", xref: "paper", x0: 0, x1: 1, y0: 1, y1: 1, line: { color: ALLOWED, width: 2.5 } },
      ],
      annotations:
        first < 0 || shares[first] === null
          ? []
          : [{ x: at[first], y: Math.log10(shares[first]), text: "first divergence", ax: 0, ay: -24 }],
    },
  });
}

// What is closer than this share of what is allowed, zero above all, is drawn there.
const LEAST_SHARE = 1e-3;
const COLOURS = ["#2f7fd0", "#c2701a", "#5b9a4b", "#9a5fc0", "#8d93a0"];

// From the failure to its point.
function divergenceLink(made) {
  return el(
    "button",
    {
      type: "button",
      click: () => {
        made.scrollIntoView({ block: "center" });
        made.focus();
      },
    },
    "show it among the modules",
  );
}
