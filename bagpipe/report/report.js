"use strict";
// Draws the figure of each chart's choices and sorts tables. Uses nothing outside this file. A page's own script comes
// after it and can add to `adjusted` and `texts`; then the page calls start().

const charts = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 40rem)");
const chosen = {}; // name of a choice -> index; charts that share a name move together
const adjusted = {}; // meta of a layout -> changes the traces before they are drawn
const texts = { missing: "There is no such combination." };

function start() {
  for (const table of document.querySelectorAll("table")) makeSortable(table);
  for (const wide of document.querySelectorAll(".wide")) hintAtMore(wide);
  for (const chart of Object.values(charts)) {
    for (const choice of chart.choices) chosen[choice.name] ??= choice.default;
  }
  for (const select of document.querySelectorAll("select[data-choice]")) {
    select.addEventListener("change", () => choose(select.dataset.choice, Number(select.value)));
  }
  drawAll();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  document.documentElement.dataset.drawn = "yes";
}

function choose(name, index) {
  chosen[name] = index;
  for (const select of document.querySelectorAll(`select[data-choice="${name}"]`)) select.value = String(index);
  for (const [id, chart] of Object.entries(charts)) {
    if (chart.choices.some((choice) => choice.name === name)) draw(id);
  }
}

function drawAll() {
  for (const id of Object.keys(charts)) draw(id);
}

function draw(id) {
  const chart = charts[id];
  const plot = document.querySelector(`#${CSS.escape(id)} .plot`);
  const figure = chart.figures[chart.choices.map((choice) => chosen[choice.name]).join(",")];
  plot.classList.toggle("empty", !figure);
  if (!figure) {
    if (plot.classList.contains("js-plotly-plot")) Plotly.purge(plot);
    plot.textContent = texts.missing;
    return;
  }
  if (!plot.classList.contains("js-plotly-plot")) plot.textContent = "";
  const { data, layout } = dressed(figure);
  adjusted[layout.meta]?.(data);
  Plotly.react(plot, data, layout, {
    responsive: true,
    displaylogo: false,
    displayModeBar: narrow.matches ? false : "hover",
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    toImageButtonOptions: { filename: id, format: "svg" },
  });
  plot.widths = data.map((trace) => trace.line?.width);
  if (layout.meta === "lift" && !plot.dataset.lifts) {
    plot.dataset.lifts = "yes";
    plot.on("plotly_hover", (event) => lift(plot, event.points[0].curveNumber));
    plot.on("plotly_unhover", () => lift(plot, null));
  }
  if (layout.meta?.choose && !plot.dataset.chooses) {
    plot.dataset.chooses = "yes";
    plot.on("plotly_click", (event) => {
      const number = numberNear(plot, event.points[0]);
      if (number !== null) choose(layout.meta.choose, number);
    });
  }
}

// The number (customdata) of the clicked point, or of the nearest point that has one: smaller points may lie over it.
function numberNear(plot, { x, y, xaxis, yaxis }) {
  const away = (trace, place) =>
    Math.hypot(xaxis.d2p(trace.x[place]) - xaxis.d2p(x), yaxis.d2p(trace.y[place]) - yaxis.d2p(y));
  let found = null;
  let least = 12; // pixels
  for (const trace of plot.data) {
    trace.customdata.forEach((number, place) => {
      if (Number.isInteger(number) && away(trace, place) < least) [found, least] = [number, away(trace, place)];
    });
  }
  return found;
}

// Draw one curve strong and the others pale; null: all as they were.
function lift(plot, chosen) {
  const widths = plot.widths.map((_, number) => (number === chosen ? 4 : plot.widths[number]));
  const opacities = plot.data.map((_, number) => (chosen === null || number === chosen ? 1 : 0.25));
  Plotly.restyle(plot, { "line.width": widths, opacity: opacities });
}

// Says how a table that is wider or longer than its frame goes on, until it is seen whole.
function hintAtMore(wide) {
  const frame = wide.querySelector(".scroll");
  const text = wide.querySelector(".more");
  const show = () => {
    const right = frame.scrollWidth - frame.clientWidth - frame.scrollLeft > 2;
    const below = frame.scrollHeight - frame.clientHeight - frame.scrollTop > 2;
    wide.classList.toggle("right", right);
    const parts = [right && "more columns to the right", below && "more rows below"].filter(Boolean);
    text.hidden = !parts.length;
    text.textContent = parts.length ? `Scroll the table: ${parts.join(", ")}` : "";
  };
  frame.addEventListener("scroll", show, { passive: true });
  new ResizeObserver(show).observe(frame);
  show();
}

// A copy of the figure in the reader's colours and for his width. Plotly writes into what it is given.
function dressed(figure) {
  const style = getComputedStyle(document.body);
  const color = (name) => style.getPropertyValue(name).trim();
  const { data, layout } = JSON.parse(JSON.stringify(figure), (key, value) =>
    dark.matches && key === "color" ? lighter[value] ?? value : value,
  );
  for (const [name, axis] of Object.entries(layout)) {
    if (!/^[xy]axis/.test(name)) continue;
    Object.assign(axis, { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--soft") });
    axis.title = { ...axis.title, standoff: 10 };
    if (narrow.matches) axis.tickfont = { size: 11 };
  }
  const many = data.filter((trace) => trace.showlegend !== false).length > 12; // more than fit above the plot
  Object.assign(layout, {
    font: { family: style.fontFamily, size: 13, color: color("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 50, r: 20, t: many ? 30 : 10, b: 45 },
    height: layout.height ?? (narrow.matches ? 440 : many ? Math.min(80 + 17 * data.length, 800) : 420),
    hovermode: layout.hovermode ?? "closest",
    hoverlabel: { bgcolor: color("--wash"), bordercolor: color("--soft"), font: { color: color("--ink") }, align: "left" },
    showlegend: !(narrow.matches && many),
    legend: many ? { x: 1.02, y: 1, font: { size: 11 } } : { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--soft"), activecolor: color("--ink") },
  });
  return { data, layout };
}

// Colours that are too dark on a dark page.
const lighter = {
  "#000000": "#f2f2f2",
  "#0072b2": "#3fa9f5",
  "#d55e00": "#ff7b29",
  "#009e73": "#19c797",
  "#d00000": "#ff5c5c",
  "#2f4f9e": "#6d8fe8",
};

function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row, place) => ({ row, place, value: valueOf(row, column) }));
      rows.sort((a, b) => compare(a.value, b.value, falling) || a.place - b.place);
      table.tBodies[0].append(...rows.map((entry) => entry.row));
    });
  });
}

function valueOf(row, column) {
  const cell = row.cells[column];
  if (cell === undefined || cell.dataset.v === undefined) return null;
  return cell.classList.contains("text") ? cell.dataset.v : Number(cell.dataset.v);
}

// Cells without a value come last, whichever way the others go.
function compare(a, b, falling) {
  if (a === null || b === null) return (a === null) - (b === null);
  const order = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return falling ? -order : order;
}
