// The collectives of each rank: a line of marks in the order in which the rank issued them, and a table of each trace.

const LINE = /^(\S+)\s+(\S+)\s+(\S+)\s+(\d+) B\s+ranks (\S+)\s*(.*)$/;
const KINDS = {
  all_gather: { symbol: "square", color: "#2f7fd0" },
  reduce_scatter: { symbol: "diamond", color: "#c2701a" },
  all_reduce: { symbol: "circle", color: "#3f9a63" },
  all_to_all: { symbol: "cross", color: "#9a5fc0" },
  broadcast: { symbol: "triangle-up", color: "#b0568a" },
};
const OTHER_KIND = { symbol: "hexagon", color: "#8d93a0" };

function parsed(line) {
  const found = LINE.exec(line);
  if (!found) return { phase: "", kind: line.trim(), dtype: "", bytes: null, group: "", unit: "" };
  const [, phase, kind, dtype, bytes, group, unit] = found;
  return { phase, kind, dtype, bytes: Number(bytes), group, unit };
}

function byteCount(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let power = 0;
  for (; bytes >= 1000 && power < 3; power += 1) bytes /= 1000;
  return `${Number(bytes.toPrecision(3))} ${units[power]}`;
}

// The positions of `lines` that are no part of a longest common subsequence with `others`.
function onlyHere(lines, others) {
  const longest = Array.from({ length: lines.length + 1 }, () => new Uint16Array(others.length + 1));
  for (let i = lines.length - 1; i >= 0; i -= 1) {
    for (let j = others.length - 1; j >= 0; j -= 1) {
      longest[i][j] =
        lines[i] === others[j] ? longest[i + 1][j + 1] + 1 : Math.max(longest[i + 1][j], longest[i][j + 1]);
    }
  }
  const found = new Set();
  for (let i = 0, j = 0; i < lines.length;) {
    if (j < others.length && lines[i] === others[j]) {
      i += 1;
      j += 1;
    } else if (j < others.length && longest[i][j + 1] >= longest[i + 1][j]) j += 1;
    else found.add(i++);
  }
  return found;
}

const ranksOf = (ranks) => `rank${ranks.length > 1 ? "s" : ""} ${ranks.join(", ")}`;

function traceTable(trace, missing) {
  const items = trace.lines.map(parsed);
  const sum = items.reduce((bytes, item) => bytes + (item.bytes || 0), 0);
  const rows = items.map((item, i) => [
    missing.has(i) ? el("strong", {}, `${i} ≠`) : String(i),
    item.phase,
    item.kind,
    item.dtype,
    item.bytes === null ? "" : byteCount(item.bytes),
    item.group,
    item.unit,
  ]);
  const marked = missing.size ? ` ≠: ${plural(missing.size, "collective")} that the first trace lacks.` : "";
  const caption = `${ranksOf(trace.ranks)}: ${plural(items.length, "collective")}, ${byteCount(sum)}.${marked}`;
  return table(caption, ["#", "phase", "kind", "dtype", "bytes", "group", "unit"], rows, { class: "trace" });
}

// Successive collectives of one phase: [[phase, first, last], ...].
function phasesOf(lines) {
  const found = [];
  lines.map(parsed).forEach(({ phase }, i) => {
    if (found.length && found.at(-1)[0] === phase) found.at(-1)[2] = i;
    else found.push([phase, i, i]);
  });
  return found;
}

function kindTraces(collectives, ranks) {
  const marks = collectives.flatMap((trace) =>
    trace.lines.map(parsed).flatMap((item, i) => trace.ranks.map((rank) => ({ ...item, i, rank }))),
  );
  return [...Map.groupBy(marks, (mark) => mark.kind)].map(([kind, of]) => ({
    x: of.map((mark) => mark.i),
    y: of.map((mark) => ranks.indexOf(mark.rank)),
    name: plain(kind),
    type: "scatter",
    mode: "markers",
    marker: { ...(KINDS[kind] || OTHER_KIND), size: 10 },
    hoverinfo: "text",
    text: of.map(({ rank, i, phase, dtype, bytes, unit }) =>
      plain(`rank ${rank}, ${i}: ${phase} ${kind} ${dtype} ${bytes === null ? "" : byteCount(bytes)} ${unit}`),
    ),
  }));
}

function collectivesFigure(collectives, where) {
  const issued = collectives.filter((trace) => trace.ranks.length);
  const longest = Math.max(0, ...issued.map((trace) => trace.lines.length));
  if (!longest) return null;
  const ranks = issued.flatMap((trace) => trace.ranks).toSorted((a, b) => a - b);
  const [first, ...others] = issued;
  const bands = phasesOf(first.lines);
  // One band for all ranks, so only where the phases of all ranks are the same.
  const alike = others.every((trace) => JSON.stringify(phasesOf(trace.lines)) === JSON.stringify(bands));
  const counts = issued.map((trace) => `${ranksOf(trace.ranks)} ${trace.lines.length}`);
  const tables = issued.map((trace, i) => traceTable(trace, i ? onlyHere(trace.lines, first.lines) : new Set()));
  return figure({
    title: "Collectives of each rank, in order",
    label: `Collectives of each rank in the order in which it issued them, ${where}: ${counts.join("; ")}.`,
    traces: kindTraces(issued, ranks),
    values: el("div", {}, tables),
    width: longest * 13 + 110,
    notes: others.length
      ? [`The ranks issued ${issued.length} different sequences; in the tables ≠ marks what the first lacks.`]
      : [],
    layout: {
      height: 130 + 26 * ranks.length,
      xaxis: { ...AXIS, title: { text: "position in the sequence" }, range: [-0.7, longest - 0.3], showgrid: false },
      yaxis: {
        ...AXIS,
        tickvals: ranks.map((_, i) => i),
        ticktext: ranks.map((rank) => `rank ${rank}`),
        range: [ranks.length - 0.4, -0.9],
      },
      shapes: alike
        ? bands.map(([, from, to], i) => ({
            type: "rect",
            layer: "below",
            x0: from - 0.5,
            x1: to + 0.5,
            y0: 0,
            y1: 1,
            yref: "paper",
            line: { width: 0 },
            fillcolor: i % 2 ? "rgba(128,140,160,0.10)" : "rgba(128,140,160,0.22)",
          }))
        : [],
      annotations: alike
        ? bands
            .filter(([, from, to], i) => to - from > 2 || bands.length < 8)
            .map(([phase, from]) => ({
              x: from - 0.45,
              y: 1,
              yref: "paper",
              xanchor: "left",
              yanchor: "top",
              text: plain(phase),
              showarrow: false,
              font: { size: 10 },
            }))
        : [],
    },
  });
}

// How the collectives of a rank differ from those in another run, in one sentence; empty if one of them has none.
function comparison(mine, theirs, label) {
  const [a, b] = [mine, theirs].map(
    (collectives) => collectives.find((trace) => trace.ranks.includes(0)) || collectives[0],
  );
  if (!a || !b) return "";
  const squeeze = (trace) => trace.lines.map((line) => line.replace(/\s+/g, " "));
  const here = onlyHere(squeeze(a), squeeze(b)).size;
  const there = onlyHere(squeeze(b), squeeze(a)).size;
  return here || there
    ? `Collectives of ${ranksOf(a.ranks.slice(0, 1))} compared with ${label}: ${here} only here, ${there} only there.`
    : `The collectives of ${ranksOf(a.ranks.slice(0, 1))} are those of ${label}.`;
}
