// Shows the nearest point of a chart beside the mouse.
for (const svg of document.querySelectorAll("svg[data-points]")) {
  const points = JSON.parse(svg.dataset.points);
  const tip = svg.parentElement.appendChild(document.createElement("div"));
  tip.className = "tip";
  svg.addEventListener("mouseleave", () => (tip.style.display = "none"));
  svg.addEventListener("mousemove", (event) => {
    const box = svg.getBoundingClientRect();
    const outer = svg.parentElement.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let best = null;
    let least = 50 ** 2;
    for (const point of points) {
      const distance = (point[0] - x) ** 2 + (point[1] - y) ** 2;
      if (distance < least) {
        least = distance;
        best = point;
      }
    }
    tip.style.display = best ? "block" : "none";
    if (!best) return;
    tip.textContent = best[2];
    const left = best[0] / scale + box.left - outer.left + 10;
    tip.style.left = `${Math.max(0, Math.min(left, outer.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${best[1] / scale + box.top - outer.top - 28}px`;
  });
}
