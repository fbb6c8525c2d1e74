// The matrix: a row for each requirement, which opens to its cases, or a row for each case.

const MOST_ROWS = 200; // of cases that are laid out at once
const matrix = byId("matrix");

function matrixHead(columns, rowsAreCases) {
  const groups = [...Map.groupBy(columns, (column) => column.implementation)];
  const several = DATA.runs.length > 1;
  const first = (text) => el("th", { scope: "col", rowspan: several ? 2 : 1, class: "corner" }, text);
  const names = groups.map(([name, group]) =>
    several
      ? el("th", { scope: "colgroup", colspan: group.length }, name)
      : el("th", { scope: "col" }, name, versionOf(group[0])),
  );
  const runs = groups.flatMap(([, group]) =>
    group.map((column, i) =>
      el("th", { scope: "col", class: i ? "" : "first" }, DATA.runs[column.run], versionOf(column)),
    ),
  );
  return [
    el("tr", {}, first(rowsAreCases ? "case" : "requirement"), first(rowsAreCases ? "requirements" : "cases"), names),
    several ? el("tr", {}, runs) : null,
  ].filter(Boolean);
}

// torch's own implementations have the version of torch, which the run's label has.
const versionOf = (column) =>
  column.version && !DATA.runs[column.run].includes(column.version.split("+")[0])
    ? [" ", el("small", {}, column.version)]
    : null;

const firstOfGroup = (columns, i) => i === 0 || columns[i - 1].implementation !== columns[i].implementation;

function countCells(columns, cases) {
  return columns.map((column, i) => {
    const counts = new Map();
    for (const number of cases) {
      const verdict = verdictOf(column, number);
      if (verdict !== undefined) counts.set(verdict, (counts.get(verdict) || 0) + 1);
    }
    const present = VERDICTS.filter((verdict) => counts.has(verdict));
    const group = DATA.columnsOf.get(column.implementation);
    const differing = group.length > 1 ? cases.filter((number) => differs(group, number, false)).length : 0;
    const mark =
      differing && counts.size ? el("span", { class: "differs" }, hidden(`${differing} differ between runs`)) : null;
    const cell = present.length ? present.map((verdict) => tally(verdict, counts.get(verdict))) : [hidden("no case")];
    return el("td", { class: firstOfGroup(columns, i) ? "first" : "" }, cell, mark);
  });
}

// Without the file; parameters may have colons too.
const shortName = (id) => id.slice(id.includes("::") ? id.indexOf("::") + 2 : 0);

// Below a requirement, a case names the others that it checks.
function caseRow(state, columns, number, owner) {
  const id = DATA.cases[number];
  const link = (of, attributes, ...children) =>
    el(
      "a",
      { href: addressOf({ ...state, case: id, of }), "data-case": id, "data-of": of, ...attributes },
      ...children,
    );
  const worst = columns.toSorted((a, b) => rankOf(a, number) - rankOf(b, number))[0];
  const cells = columns.map((column, i) => {
    const verdict = verdictOf(column, number);
    const group = DATA.columnsOf.get(column.implementation);
    const mark = differs(group, number, false)
      ? el("span", { class: "differs" }, hidden("differs between runs"))
      : null;
    // The name of the case is the link that the keyboard reaches; these would be a stop for each column.
    const cell =
      verdict === undefined
        ? hidden("no record")
        : link(column.implementation, { tabindex: -1, title: reasonOf(column, number) || null }, badge(verdict));
    return el("td", { class: firstOfGroup(columns, i) ? "first" : "" }, cell, verdict === undefined ? null : mark);
  });
  const checks = DATA.checks[number]
    .map((one) => DATA.requirements[one][0])
    .filter((id) => id !== owner)
    .join(", ");
  const name = el("th", { scope: "row" }, link(worst.implementation, {}, shortName(id)));
  return el("tr", { class: "case" }, name, el("td", { class: "checks" }, checks), cells);
}

const rankOf = (column, number) => {
  const verdict = verdictOf(column, number);
  return verdict === undefined ? VERDICTS.length : VERDICTS.indexOf(verdict);
};

// Rows for the first cases, and one with a button that appends the next.
function caseRows(state, columns, cases, owner = null) {
  const rows = cases.slice(0, MOST_ROWS).map((number) => caseRow(state, columns, number, owner));
  const rest = cases.slice(MOST_ROWS);
  if (rest.length) {
    const more = el("tr", { class: "case more" }, el("td", { colspan: columns.length + 2 }));
    const text = `show ${Math.min(rest.length, MOST_ROWS)} of ${plural(rest.length, "more case")}`;
    more.firstChild.append(
      el(
        "button",
        {
          type: "button",
          click: () => {
            const next = caseRows(state, columns, rest, owner);
            more.replaceWith(...next);
            next[0].querySelector("a").focus();
          },
        },
        text,
      ),
    );
    rows.push(more);
  }
  for (const row of rows) row.dataset.owner = owner ?? "";
  return rows;
}

function requirementRow(view, number, cases) {
  const [id, , text] = DATA.requirements[number];
  const isOpen = view.state.open.includes(id);
  const button = el(
    "button",
    { type: "button", class: "opener", "aria-expanded": String(isOpen), "data-requirement": id },
    id || "(no requirement)",
  );
  const head = el("th", { scope: "row" }, button, el("span", { class: "said" }, prose(text)));
  const row = el(
    "tr",
    { class: "requirement" },
    head,
    el("td", { class: "number" }, String(cases.length)),
    countCells(view.columns, cases),
  );
  const show = () => row.after(...caseRows(view.state, view.columns, cases, id));
  button.addEventListener("click", () => {
    const opens = button.getAttribute("aria-expanded") === "false";
    button.setAttribute("aria-expanded", String(opens));
    if (opens) show();
    else for (const one of [...matrix.querySelectorAll("tr.case")]) if (one.dataset.owner === id) one.remove();
    view.toggled(id, opens);
  });
  return { row, show: isOpen ? show : null };
}

function chapterBody(view, [name, subject], requirements) {
  const title = el(
    "th",
    { scope: "rowgroup", colspan: view.columns.length + 2 },
    el("span", {}, name || "no chapter", subject ? el("small", {}, prose(subject)) : null),
  );
  const body = el("tbody", {}, el("tr", { class: "chapter" }, title));
  for (const [number, cases] of requirements) {
    const { row, show } = requirementRow(view, number, cases);
    body.append(row);
    if (show) show();
  }
  return body;
}

// Shows the cases; `toggled` is told the requirement that the reader opens or closes.
function showMatrix(state, columns, cases, toggled) {
  const view = { state, columns, toggled };
  const bodies = [];
  if (state.rows === "cases") {
    bodies.push(el("tbody", {}, caseRows(state, columns, cases)));
  } else {
    const byRequirement = new Map();
    for (const number of cases) {
      for (const one of DATA.checks[number]) {
        if (state.chapter && DATA.requirements[one][1] !== state.chapter) continue;
        if (!byRequirement.has(one)) byRequirement.set(one, []);
        byRequirement.get(one).push(number);
      }
    }
    for (const chapter of DATA.chapters) {
      const mine = DATA.requirements.flatMap(([, name], i) =>
        name === chapter[0] && byRequirement.has(i) ? [[i, byRequirement.get(i)]] : [],
      );
      if (mine.length) bodies.push(chapterBody(view, chapter, mine));
    }
  }
  const all = el(
    "tr",
    {},
    el("th", { scope: "row" }, "all"),
    el("td", { class: "number" }, String(cases.length)),
    countCells(columns, cases),
  );
  matrix.replaceChildren(
    matrix.caption,
    el("thead", {}, matrixHead(columns, state.rows === "cases")),
    ...bodies,
    el("tfoot", {}, all),
  );
}
