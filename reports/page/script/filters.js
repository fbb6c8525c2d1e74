// Which cases and columns are shown, and the form that says so.

const form = byId("filters");

function fillForm(state) {
  for (const box of form.querySelectorAll("input[type=checkbox]")) box.checked = state[box.name].includes(box.value);
  form.elements.chapter.value = DATA.chapterNames.has(state.chapter) ? state.chapter : "";
  form.elements.text.value = state.text;
  if (form.elements.differ) form.elements.differ.value = state.differ;
  for (const radio of form.elements.rows) radio.checked = radio.value === (state.rows || "requirements");
}

function readForm(state) {
  const fields = new FormData(form);
  const rows = fields.get("rows") === "cases" ? "cases" : "";
  return {
    ...state,
    chapter: fields.get("chapter"),
    text: fields.get("text"),
    differ: fields.get("differ") || "",
    rows,
    verdict: fields.getAll("verdict"),
    impl: fields.getAll("impl"),
  };
}

function shownColumns(state) {
  const chosen = state.impl.filter((name) => DATA.columnsOf.has(name));
  return chosen.length ? DATA.columns.filter((column) => chosen.includes(column.implementation)) : DATA.columns;
}

// What a text is searched in: the case, its requirements, and the reasons of its verdicts.
const searched = new Map();
function searchedText(number) {
  if (!searched.has(number)) {
    const requirements = DATA.checks[number].map((one) => DATA.requirements[one][0]);
    const reasons = DATA.columns.map((column) => reasonOf(column, number));
    searched.set(number, [DATA.cases[number], ...requirements, ...new Set(reasons)].join("\n").toLowerCase());
  }
  return searched.get(number);
}

// The numbers of the cases that all filters let through. A verdict counts in the columns that are shown.
function shownCases(state, columns) {
  const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
  const verdicts = new Set(state.verdict);
  const groups = Map.groupBy(columns, (column) => column.implementation);
  const shown = [];
  for (let number = 0; number < DATA.cases.length; number += 1) {
    const chapters = () => DATA.checks[number].map((one) => DATA.requirements[one][1]);
    const asked = columns.some((column) => verdictOf(column, number) !== undefined);
    if (
      asked &&
      (!state.chapter || chapters().includes(state.chapter)) &&
      (!verdicts.size || columns.some((column) => verdicts.has(verdictOf(column, number)))) &&
      (!state.differ || [...groups.values()].some((group) => differs(group, number, state.differ === "skips"))) &&
      words.every((word) => searchedText(number).includes(word))
    ) {
      shown.push(number);
    }
  }
  return shown;
}
