// One record: a case on one implementation in one run.

function failurePart(record, headed, byModule) {
  const failure = record.failure;
  if (!failure) return null;
  const element = failure.element && failure.element.length ? `[${failure.element.join(", ")}]` : null;
  const place = [
    ["stage", failure.stage],
    ["step", shown(failure.step)],
    ["rank", shown(failure.rank)],
    ["tensor", failure.name],
    ["element", element],
  ];
  return el(
    "section",
    { class: "failure" },
    el("h4", {}, "Failure"),
    definitions(place),
    byModule && divergenceOf(record.own.distances, failure) >= 0 ? divergenceLink(byModule) : null,
    scrolling(`text of the failure, ${headed}`, el("pre", {}, failure.text)),
  );
}

// What a second run with capture on showed; the failure's text ends with all of it in words.
function explanationPart(record, headed) {
  const explanation = record.explanation;
  if (!explanation) return null;
  const first = explanation.first || {};
  const numbers = (values) =>
    Object.entries(values || {})
      .map(([run, value]) => `${run} ${value}`)
      .join(", ");
  const pairs = [
    ["second run", `${explanation.again}${explanation.alike ? ", in the same way" : ""}`],
    ["stage", first.stage],
    ["step", shown(first.step)],
    ["rank", shown(first.rank)],
    ["tensor", first.name],
    ["module", explanation.module],
    ["parameter", explanation.parameter],
    ["where", explanation.where],
    ["offset in shard", shown(explanation.offset)],
    ["values", numbers(explanation.values)],
    ["ulps", numbers(explanation.ulps)],
    ["also", (explanation.also || []).join(", ")],
  ];
  const lines = explanation.collectives || [];
  const marked = lines.length
    ? [
        el("p", { class: "note" }, "Collectives: - is missing, + is extra."),
        scrolling(`collectives with marks, ${headed}`, el("pre", {}, lines.join("\n"))),
      ]
    : null;
  return el("section", { class: "failure" }, el("h4", {}, "First divergence"), definitions(pairs), marked);
}

const shown = (value) => (value === null || value === undefined ? "" : String(value));

function commandPart(command, headed) {
  if (!command) return null;
  const said = el("span", { role: "status", class: "note" });
  const copy = el(
    "button",
    {
      type: "button",
      "aria-label": `copy the command, ${headed}`,
      click: async () => {
        try {
          await navigator.clipboard.writeText(command);
          said.textContent = "copied";
        } catch {
          // Without leave to write to the clipboard the command is selected instead, ready for the reader's own copy.
          getSelection().selectAllChildren(line);
          said.textContent = "selected";
        }
      },
    },
    "copy",
  );
  const line = el("code", {}, command);
  return el(
    "section",
    { class: "command" },
    el("h4", {}, "Repeat it"),
    el("div", {}, scrolling(`command, ${headed}`, el("pre", {}, line)), copy),
    said,
  );
}

function factsOf(record, column) {
  const seeds = Object.entries(record.seeds || {})
    .map(([name, seed]) => `${name} ${seed}`)
    .join(", ");
  const spent = Object.entries(record.spent || {})
    .toSorted(([, a], [, b]) => b - a)
    .map(([name, seconds]) => `${name} ${Number(seconds.toPrecision(2))} s`)
    .join(", ");
  return definitions([
    ["expected", record.expected],
    ["missing", (record.missing || []).join(", ")],
    ["version", column.version],
    ["device", record.device],
    ["seeds", seeds],
    ["time", `${Number((record.seconds ?? 0).toPrecision(3))} s`],
    ["time by activity", spent],
    ["peak memory", (record.peak_bytes || []).map((bytes, rank) => `rank ${rank} ${byteCount(bytes)}`).join(", ")],
    ["attempt", record.attempt ? `${record.attempt}, after ${(record.earlier || []).join(", ")}` : ""],
    ["left out", record.shortened ? `${record.shortened.join(", ")}: the record was too large` : ""],
  ]);
}

// The section of a record and its figures, which are drawn once the section is in the page. It always has the same
// number of parts, some of them empty, so that those of several runs are beside each other.
function recordSection(record, column, headed, against) {
  const byModule = moduleFigure(record.own, record.failure, headed);
  const figures = [
    lossFigure(record.losses || {}, headed),
    distanceFigure(record.distances || [], headed),
    byModule,
    collectivesFigure(record.collectives, headed),
  ];
  const some = figures.some(Boolean) || SKIPS.has(record.verdict);
  const last = against ? comparison(record.collectives, against.record.collectives, against.headed) : "";
  const parts = [
    el("h3", {}, headed, " ", badge(record.verdict)),
    el("div", {}, failurePart(record, headed, byModule), explanationPart(record, headed), factsOf(record, column)),
    ownPart(record.own, headed),
    commandPart(record.reproduce, headed),
    ...figures,
    el("p", { class: "note" }, some ? last : "The run file has no losses, distances or collectives of this case."),
  ];
  const section = el(
    "section",
    { class: `record ${record.verdict}` },
    parts.map((part) => part || el("div", {})),
  );
  return { section, figures: figures.filter(Boolean) };
}
