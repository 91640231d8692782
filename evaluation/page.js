"use strict";
(() => {
  const LINES = 12; // in a figure, at most
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const one = (selector, within = document) => within.querySelector(selector);
  const { figures, names, common, runs } = JSON.parse(one("#data").textContent);

  // What the reader chose outlives a reload, which a live page does by itself.
  const MEMORY = `ropewalk ${location.pathname}`;
  const choice = { hidden: [], data: "", seed: "", sort: {}, unit: {}, theme: "", a: "0", b: "" };
  try {
    Object.assign(choice, JSON.parse(sessionStorage.getItem(MEMORY)));
  } catch {}
  const remember = () => {
    try {
      sessionStorage.setItem(MEMORY, JSON.stringify(choice));
    } catch {}
  };

  // Tables

  const accepted = (encoding, seed) =>
    !choice.hidden.includes(encoding) && (choice.seed === "each" ? seed !== "" : seed === choice.seed);

  const order = ({ dataset }) => choice.sort[dataset.id] ?? [Number(dataset.sorted), false];

  function sort(table) {
    const [column, descending] = order(table);
    if (Number.isNaN(column)) return; // as it came
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => (Number(a) - Number(b) || a.localeCompare(b)) * (descending ? -1 : 1);
    const rows = all("tbody tr", table);
    rows.sort((a, b) => (value(a) === "") - (value(b) === "") || compare(value(a), value(b)));
    one("tbody", table).append(...rows);
    for (const button of all("thead button", table)) {
      const mine = Number(button.dataset.column) === column;
      button.parentElement.ariaSort = mine ? (descending ? "descending" : "ascending") : "none";
    }
  }

  // The rows stay ordered by the same length, in the quantity that is shown now.
  function show(measure, unit) {
    const table = one("table", measure);
    choice.unit[table.dataset.id] = measure.dataset.unit = unit;
    const [column, descending] = order(table);
    const width = Number(table.dataset.columns);
    const place = column - 2; // among the columns of all quantities
    if (place >= 0 && place < width * all(".unit option", measure).length) {
      choice.sort[table.dataset.id] = [2 + (place % width) + width * Number(unit), descending];
    }
    sort(table);
  }

  let shown = new Set(); // rows whose lines the figures show

  function update() {
    remember();
    shown = new Set();
    for (const section of all(".results")) section.hidden = choice.data !== "" && section.id !== choice.data;
    for (const measure of all(".measure")) {
      const rows = all("tbody tr", measure);
      for (const row of rows) row.hidden = !accepted(row.dataset.encoding, row.dataset.seed);
      const visible = rows.filter((row) => !row.hidden);
      const first = visible.slice(0, LINES);
      for (const row of first) shown.add(row.id);
      one(".count", measure).textContent =
        visible.length > LINES ? `The figures show the first ${LINES} of these ${visible.length} rows.` : "";
      one(".key", measure).replaceChildren(
        ...first.map((row) => {
          const item = document.createElement("li");
          item.append(one(".name", row).cloneNode(true));
          if (row.dataset.seed !== "") item.append(`, seed ${row.dataset.seed}`);
          return item;
        }),
      );
    }
    for (const figure of all(".chart")) {
      const other = (figure.dataset.unit ?? "") !== "" && figure.dataset.unit !== figure.closest(".measure").dataset.unit;
      figure.hidden = other || !traces(figure).length;
      if (drawn.has(figure) && !figure.hidden) draw(figure);
    }
  }

  // Figures

  const drawn = new Set();

  const traces = (figure) =>
    figures[figure.dataset.figure].data.filter(({ meta }) =>
      meta.rows.length
        ? meta.rows.some((row) => shown.has(row))
        : !choice.hidden.includes(meta.encoding) && (["", "each"].includes(choice.seed) || choice.seed === meta.seed),
    );

  function draw(figure, size = {}) {
    const plot = one(".plot", figure);
    const { color, borderTopColor: line, fontFamily: family } = getComputedStyle(plot);
    const page = getComputedStyle(document.body);
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, zeroline: false, automargin: true, ticklabelstandoff: 4, title: { standoff: 10 } };
    const theme = {
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { family, color, size: 12 },
      xaxis: axis,
      yaxis: axis,
      margin: { l: 48, r: 12, t: 24, b: 40 },
      showlegend: false,
      modebar: { bgcolor: "transparent", color: line, activecolor: color },
      hoverlabel: { bgcolor: page.backgroundColor, bordercolor: line, font: { color: page.color, size: 13 }, namelength: -1 },
      colorscale: { diverging: [[0, "#d1661f"], [0.5, line], [1, "#3d7ede"]] },
      shapedefaults: { line: { color, width: 1, dash: "3px,3px" }, label: { font: { color } } },
    };
    const layout = structuredClone(figures[figure.dataset.figure].layout);
    const mouse = matchMedia("(hover: hover)").matches; // a finger scrolls the page
    Object.assign(layout, { template: { layout: theme }, dragmode: mouse && "zoom", uirevision: "kept", ...size });
    const modeBarButtons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
    const options = { responsive: true, displaylogo: false, displayModeBar: mouse && "hover", modeBarButtons };
    Plotly.react(plot, structuredClone(traces(figure)), layout, options);
    drawn.add(figure);
  }

  const near = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        draw(target);
      }
    },
    { rootMargin: "300px" },
  );

  // Configurations

  function showConfig() {
    const table = one("#config");
    if (!table) return;
    remember();
    const chosen = [choice.a, choice.b].filter((i) => runs[i]).map((i) => ({ ...common, ...runs[i] }));
    const told = names.filter((name) =>
      chosen.length === 2 ? chosen[0][name] !== chosen[1][name] : chosen[0][name] !== undefined,
    );
    table.replaceChildren();
    for (const name of told) {
      const row = table.insertRow();
      const head = document.createElement("th");
      head.scope = "row";
      head.textContent = name;
      row.append(head);
      for (const config of chosen) row.insertCell().textContent = config[name] ?? "–";
    }
    if (!told.length) table.insertRow().insertCell().textContent = "No difference.";
  }

  // Controls

  const dark = () => (choice.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  function paint() {
    if (choice.theme) document.documentElement.dataset.theme = choice.theme;
    one("#theme").textContent = dark() ? "Light" : "Dark";
    for (const figure of drawn) draw(figure);
  }

  one("#theme").addEventListener("click", () => {
    choice.theme = dark() ? "light" : "dark";
    remember();
    paint();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

  for (const button of all(".ranking thead button")) {
    button.addEventListener("click", () => {
      const table = button.closest("table");
      const ascending = button.parentElement.ariaSort === "ascending";
      choice.sort[table.dataset.id] = [Number(button.dataset.column), ascending];
      sort(table);
      update();
    });
  }

  for (const measure of all(".measure")) {
    const select = one(".unit", measure);
    if (select) select.value = choice.unit[one("table", measure).dataset.id] ?? "0";
    show(measure, select?.value || "0");
    select?.addEventListener("change", () => {
      show(measure, select.value);
      update();
    });
  }

  const filters = one(".filters");
  if (filters) {
    const boxes = all("[name=encoding]", filters);
    const read = () => {
      choice.hidden = boxes.filter((box) => !box.checked).map((box) => box.value);
      for (const name of ["data", "seed"]) choice[name] = filters.elements[name].value;
      update();
    };
    for (const box of boxes) box.checked = !choice.hidden.includes(box.value);
    for (const name of ["data", "seed"]) {
      const select = filters.elements[name];
      select.value = choice[name];
      if (select.selectedIndex < 0) select.value = choice[name] = ""; // it is gone
    }
    filters.addEventListener("change", read);
    for (const [id, checked] of [["#every", true], ["#none", false]]) {
      one(id).addEventListener("click", () => {
        for (const box of boxes) box.checked = checked;
        read();
      });
    }
  }
  for (const select of all(".pair select")) {
    select.value = choice[select.name];
    select.addEventListener("change", () => {
      choice[select.name] = select.value;
      showConfig();
    });
  }

  // On paper: light, every figure, as wide as half a page.
  addEventListener("beforeprint", () => {
    for (const figure of all(".chart")) if (!figure.hidden) draw(figure, { width: 340, height: 280, autosize: false });
  });
  addEventListener("afterprint", () => drawn.forEach((figure) => draw(figure)));

  const seconds = Number(document.body.dataset.live);
  if (seconds) {
    let touched = 0;
    for (const event of ["pointermove", "pointerdown", "keydown", "scroll"]) {
      addEventListener(event, () => (touched = Date.now()), { passive: true });
    }
    setInterval(() => {
      if (!document.hidden && Date.now() - touched > 3000) location.reload(); // not under the reader's hand
    }, 1000 * seconds);
  }

  paint();
  update();
  showConfig();
  for (const figure of all(".chart")) near.observe(figure);
})();
