// A chip shows or hides a line in all figures of its section.
for (const chip of document.querySelectorAll(".chips button"))
  chip.addEventListener("click", () => {
    const shown = chip.getAttribute("aria-pressed") !== "true";
    chip.setAttribute("aria-pressed", shown);
    for (const line of chip.closest("section").querySelectorAll(".line"))
      if (line.dataset.line === chip.textContent) line.classList.toggle("hidden", !shown);
  });

// A click on a head sorts by its column, a second one the other way round. Empty cells come last.
for (const head of document.querySelectorAll("thead th"))
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0];
    const down = (head.dataset.down = head.dataset.down === "1" ? "" : "1");
    const value = (row) => {
      const text = row.cells[head.cellIndex].textContent.replace(/[,\u2265]|>= |<= /g, "").trim();
      const number = parseFloat(text);
      return text === "" ? null : Number.isNaN(number) ? text : number;
    };
    const compare = (a, b) => (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1);
    const rows = [...body.rows].sort((one, two) => {
      const [a, b] = [value(one), value(two)];
      if (a === null || b === null) return (a === null) - (b === null);
      return down ? compare(a, b) : compare(b, a);
    });
    body.append(...rows);
  });

// A figure as a file. The style sheet stays behind, so its values are written into the copy.
async function save(svg, kind) {
  const copy = svg.cloneNode(true);
  const nodes = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(nodes[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font", "display"])
      node.style.setProperty(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.style.background = getComputedStyle(document.body).backgroundColor;
  const { width, height } = svg.viewBox.baseVal;
  copy.setAttribute("width", 2 * width);
  copy.setAttribute("height", 2 * height);
  let url = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  if (kind === "png") {
    const image = Object.assign(new Image(), { src: url });
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0);
    url = canvas.toDataURL();
  }
  Object.assign(document.createElement("a"), { href: url, download: `${svg.getAttribute("aria-label")}.${kind}` }).click();
}
for (const svg of document.querySelectorAll(".panels svg")) {
  const holder = document.createElement("div");
  svg.replaceWith(holder);
  const buttons = document.createElement("span");
  buttons.className = "save";
  for (const kind of ["svg", "png"]) {
    const button = Object.assign(document.createElement("button"), { textContent: kind });
    button.addEventListener("click", () => save(svg, kind));
    buttons.append(button);
  }
  holder.append(svg, buttons);
}
