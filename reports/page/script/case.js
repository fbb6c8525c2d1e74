// A case: its requirements and parameters, its verdicts everywhere, and its records on one implementation side by side.

const article = byId("case");

function requirementsOf(number) {
  return el(
    "ul",
    { class: "requirements" },
    DATA.checks[number].map((one) => {
      const [id, , text] = DATA.requirements[one];
      return el("li", {}, el("strong", {}, id || "(no requirement)"), " ", prose(text));
    }),
  );
}

// A row for each implementation, with the verdict of each run; the name chooses the implementation below.
function verdictTable(state, number, chosen) {
  const rows = [...DATA.columnsOf].filter(([, columns]) =>
    columns.some((column) => verdictOf(column, number) !== undefined),
  );
  const body = rows.map(([name, columns]) => {
    const current = name === chosen;
    const link = el(
      "a",
      {
        href: addressOf({ ...state, of: name }),
        "data-case": state.case,
        "data-of": name,
        "aria-current": current ? "true" : null,
      },
      name,
    );
    const cells = DATA.runs.map((_, run) => {
      const column = columns.find((one) => one.run === run);
      const verdict = column && verdictOf(column, number);
      const reason = verdict && reasonOf(column, number);
      return el(
        "td",
        {},
        verdict
          ? [badge(verdict), reason ? el("small", {}, reason) : null]
          : el("span", { class: "none" }, "no record"),
      );
    });
    const mark = differs(columns, number, false) ? el("span", { class: "differs" }, " differs between runs") : null;
    return el("tr", { class: current ? "current" : "" }, el("th", { scope: "row" }, link, mark), cells);
  });
  const head = el(
    "tr",
    {},
    el("th", { scope: "col" }, "implementation"),
    DATA.runs.map((label) => el("th", { scope: "col" }, label)),
  );
  return scrolling(
    "verdicts of this case",
    el(
      "table",
      { class: "verdicts" },
      el("caption", {}, "Verdicts of this case. Choose an implementation to see its records."),
      el("thead", {}, head),
      el("tbody", {}, body),
    ),
  );
}

function neighbours(state, cases, number) {
  const place = cases.indexOf(number);
  const link = (text, other) =>
    other === undefined
      ? null
      : el(
          "a",
          {
            href: addressOf({ ...state, case: DATA.cases[other], of: state.of }),
            "data-case": DATA.cases[other],
            "data-of": state.of,
          },
          text,
        );
  return el(
    "nav",
    { "aria-label": "cases" },
    el("a", { href: addressOf({ ...state, case: "", of: "" }), "data-case": "", "data-of": "" }, "← matrix"),
    place < 0
      ? null
      : [
          link("previous", cases[place - 1]),
          link("next", cases[place + 1]),
          el("span", { class: "note" }, `${place + 1} of ${plural(cases.length, "case")} shown`),
        ],
  );
}

// The implementation whose records are shown: the chosen one, or that with the gravest verdict.
function implementationOf(state, number) {
  const asked = DATA.columns.filter((column) => verdictOf(column, number) !== undefined);
  const chosen = asked.find((column) => column.implementation === state.of);
  return (chosen || asked.toSorted((a, b) => rankOf(a, number) - rankOf(b, number))[0]).implementation;
}

// Shows the case of the state, and returns a function that draws its plots.
async function showCase(state, cases) {
  const number = DATA.numbers.get(state.case);
  if (number === undefined) {
    clear(
      article,
      neighbours(state, cases, -1),
      el("h2", { id: "case-title", tabindex: -1 }, "No such case"),
      el("p", {}, `None of the runs has ${state.case}.`),
    );
    return async () => {};
  }
  const records = await recordsOf(number);
  const chosen = implementationOf(state, number);
  const parts = [];
  for (const column of DATA.columnsOf.get(chosen)) {
    const record = records.get(column.index);
    if (!record) continue;
    const headed = DATA.runs.length > 1 ? DATA.runs[column.run] : chosen;
    parts.push({ record, headed, ...recordSection(record, column, headed, parts[0]) });
  }
  const { world, parameters } = parts[0].record;
  const given = Object.entries(parameters || {}).map(([name, value]) => [name, el("code", {}, JSON.stringify(value))]);
  const id = state.case;
  clear(
    article,
    neighbours(state, cases, number),
    el(
      "h2",
      { id: "case-title", tabindex: -1 },
      el("small", {}, id.slice(0, id.length - shortName(id).length)),
      shortName(id),
    ),
    requirementsOf(number),
    definitions([["ranks", String(world)], ...given]),
    verdictTable(state, number, chosen),
    el(
      "section",
      { class: "records", "aria-label": `records of ${chosen}` },
      el("h2", {}, chosen),
      el(
        "div",
        { class: "side-by-side" },
        parts.map((part) => part.section),
      ),
    ),
  );
  return async () => {
    for (const part of parts) for (const one of part.figures) await one.draw();
  };
}
