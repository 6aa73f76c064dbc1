// Shows the values under the pointer on every chart. The page is complete without it.
const tip = document.getElementById("tip");
for (const chart of document.querySelectorAll("svg[data-hover]")) {
  const rows = JSON.parse(chart.dataset.hover);
  const cursor = chart.querySelector(".cursor");
  const hide = () => { tip.style.visibility = cursor.style.visibility = "hidden"; };
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const x = (event.clientX - box.left) * (chart.viewBox.baseVal.width / box.width);
    const row = rows.reduce((best, row) => Math.abs(row[0] - x) < Math.abs(best[0] - x) ? row : best);
    cursor.setAttribute("x1", row[0]);
    cursor.setAttribute("x2", row[0]);
    tip.replaceChildren(...[["step", row[1]], ...row[2]].map(([name, value]) => {
      const line = document.createElement("div");
      line.textContent = `${name} ${value}`;
      return line;
    }));
    const left = event.pageX + 14 + tip.offsetWidth > document.documentElement.clientWidth
      ? event.pageX - 14 - tip.offsetWidth : event.pageX + 14;
    tip.style.left = `${left}px`;
    tip.style.top = `${event.pageY + 12}px`;
    tip.style.visibility = cursor.style.visibility = "visible";
  });
}
