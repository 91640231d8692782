const figures = JSON.parse(document.getElementById("figures").textContent);
const plots = [...document.querySelectorAll(".plot")];
const colour = (name) => {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};

// Panels stand beside each other where there is room, otherwise below each other; the legend is where there is more.
function draw(plot) {
  const figure = figures[plot.id.slice(1)];
  const width = plot.clientWidth;
  const legend = figure.data.some((trace) => trace.showlegend);
  const beside = legend && width > 900;
  const columns = Math.max(1, Math.min(figure.panels, Math.floor((width - (beside ? 220 : 0)) / 420)));
  const rows = Math.ceil(figure.panels / columns);
  const names = figure.data.filter((trace) => trace.showlegend).map((trace) => trace.name.length);
  const below = legend && !beside ? 24 * Math.ceil((names.length * Math.max(90, Math.max(...names) * 7 + 45)) / width) : 0;
  const [ink, line, muted] = ["ink", "line", "muted"].map(colour);
  const axis = { gridcolor: line, zerolinecolor: muted, linecolor: muted, automargin: true };
  const layout = {
    ...structuredClone(figure.layout),
    grid: { rows, columns, pattern: "independent", xgap: 0.12, ygap: rows > 1 ? 0.34 : 0 },
    height: rows * 330 + below,
    margin: { t: 24, r: 8, b: 44 + below, l: 8 },
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { color: ink, size: 12, family: "system-ui, sans-serif" },
    hovermode: "closest",
    dragmode: false,
    legend: beside ? { x: 1.02, y: 1, itemwidth: 40 } : { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom" },
  };
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) layout[name] = { ...axis, ...layout[name] };
  const narrow = width / columns < 420;
  for (const name of Object.keys(layout)) if (narrow && /^xaxis/.test(name)) layout[name].tickangle = -45;
  plot.style.height = `${layout.height}px`;
  Plotly.react(plot, figure.data, layout, { displaylogo: false, responsive: false, displayModeBar: false }).then(() => {
    plot.dataset.drawn = width;
    if (!plot.dataset.listens) listen(plot);
  });
}

// The line under the pointer, or its name in the legend, dims the others.
function listen(plot) {
  plot.dataset.listens = true;
  const group = (node) => node.__data__?.[0]?.trace?.legendgroup;
  const dim = (name) => {
    for (const node of plot.querySelectorAll(".scatterlayer .trace, .legend .traces"))
      node.style.opacity = !name || group(node) === name ? "" : 0.15;
  };
  plot.on("plotly_hover", (event) => dim(event.points[0].data.legendgroup));
  plot.on("plotly_unhover", () => dim());
  plot.addEventListener("pointerover", (event) => {
    const item = event.target.closest?.(".legend .traces");
    if (item) dim(group(item));
  });
  plot.addEventListener("pointerout", (event) => event.target.closest?.(".legend") && dim());
}

const seen = new IntersectionObserver(
  (entries) => entries.forEach((entry) => entry.isIntersecting && !entry.target.dataset.drawn && draw(entry.target)),
  { rootMargin: "600px" },
);
plots.forEach((plot) => seen.observe(plot));
const redraw = () => plots.forEach((plot) => plot.dataset.drawn && draw(plot));
let width = innerWidth;
addEventListener("resize", () => innerWidth !== width && ((width = innerWidth), redraw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => plots.forEach(draw));
