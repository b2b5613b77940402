// Charts of the metrics, drawn by uPlot.

import { formatNumber, formatPercent, formatSeconds, html, useEffect, useRef, useState } from "./lib.js";

const uPlot = globalThis.uPlot;
const HEIGHT = 150;
const LEAST_SPAN = 60;

const tokens = (title, name, colour) => ({
    title, colour, values: (history, span, model) => history.rate(span, model, name),
});
const gauge = (title, name, colour, combine = "sum") => ({
    title, colour, values: (history, span, model) => history.gauge(span, model, name, combine),
});
const quantile = (title, name, fraction, colour) => ({
    title, colour, values: (history, span, model) => history.quantile(span, model, name, fraction),
});
const ratio = (title, name, of, colour) => ({
    title, colour, values: (history, span, model) => history.ratio(span, model, name, of),
});

/**
 * `least`, `most`: top of the y axis, at least or exactly. `needs`: counter that is 0 if the chart's feature is not used;
 * `otherwise` is shown then.
 */
export const CHARTS = [
    {
        title: "Throughput", unit: "tokens/s", format: formatNumber, least: 10,
        series: [tokens("Output", "outputTokens", 1), tokens("Prompt", "promptTokens", 2)],
    },
    {
        title: "Requests", unit: "sequences", format: formatNumber, least: 4,
        series: [gauge("Running", "running", 1), gauge("Waiting", "waiting", 3)],
    },
    {
        title: "Finished requests", unit: "per second", format: formatNumber, least: 1,
        series: [
            tokens("Stop", "finished.stop", 1), tokens("Length", "finished.length", 2),
            tokens("Cancelled", "finished.abort", 3), tokens("Error", "finished.error", 4),
        ],
    },
    {
        title: "Time to first token", format: formatSeconds,
        series: [
            quantile("p50", "firstToken", 0.5, 1), quantile("p90", "firstToken", 0.9, 2),
            quantile("p99", "firstToken", 0.99, 3),
        ],
    },
    {
        title: "Time between tokens", format: formatSeconds,
        series: [
            quantile("p50", "interToken", 0.5, 1), quantile("p90", "interToken", 0.9, 2),
            quantile("p99", "interToken", 0.99, 3),
        ],
    },
    {
        title: "Time in queue", format: formatSeconds,
        series: [ratio("Mean", "queueSeconds", "queueCount", 1)],
    },
    {
        title: "KV cache", unit: "in use", format: formatPercent, most: 1,
        series: [gauge("Blocks", "kvUsage", 1, "max")],
    },
    {
        title: "Prefix cache", unit: "hit rate", format: formatPercent, most: 1,
        series: [ratio("Hits", "prefixHits", "prefixQueries", 1)],
    },
    {
        title: "Draft tokens", unit: "accepted", format: formatPercent, most: 1,
        needs: "draftTokens", otherwise: "No draft tokens: speculative decoding is not used.",
        series: [ratio("Accepted", "acceptedTokens", "draftTokens", 1)],
    },
];

/** A chart of the last `span` seconds. A table of its latest values is read by screen readers. */
export function Chart({ chart, history, model, span }) {
    const area = useRef(null);
    const plot = useRef(null);
    const [theme, setTheme] = useState(document.documentElement.dataset.theme);
    const times = history.times(span);
    const values = chart.series.map((series) => series.values(history, span, model));
    const unused = chart.needs && !history.gauge(span, model, chart.needs).at(-1);
    const empty = unused || !values.some((each) => each.some((value) => value !== null));

    useEffect(() => {
        const update = () => setTheme(document.documentElement.dataset.theme);
        addEventListener("neso-theme", update);
        return () => removeEventListener("neso-theme", update);
    }, []);
    useEffect(() => {
        plot.current = new uPlot(options(chart, area.current.clientWidth), [[], ...chart.series.map(() => [])],
            area.current);
        const observer = new ResizeObserver(() =>
            plot.current.setSize({ width: area.current.clientWidth, height: HEIGHT }));
        observer.observe(area.current);
        return () => {
            observer.disconnect();
            plot.current.destroy();
        };
    }, [theme]);
    useEffect(() => {
        plot.current.setData([times, ...values]);
        const end = times.at(-1) ?? Date.now() / 1000;
        const start = Math.min(Math.max(end - span, times[0] ?? 0), end - LEAST_SPAN);
        plot.current.setScale("x", { min: start, max: end });
    });
    return html`
        <figure class="chart" data-samples=${times.length}>
            <figcaption>
                <span class="title">${chart.title}</span>
                ${chart.unit && html`<span class="unit">${chart.unit}</span>`}
                <span class="legend">
                    ${chart.series.map((series, index) => html`
                        <span class="series-${series.colour}">
                            <i aria-hidden="true"></i>${series.title}${" "}
                            <b>${chart.format(values[index].at(-1) ?? null)}</b>
                        </span>`)}
                </span>
            </figcaption>
            <div class="plot" ref=${area} aria-hidden="true"></div>
            ${empty && html`<p class="no-data">${unused ? chart.otherwise : "No requests in this time."}</p>`}
        </figure>
    `;
}

function formatTime(time, withSeconds) {
    const seconds = withSeconds ? { second: "2-digit" } : {};
    return new Date(time * 1000).toLocaleTimeString([], {
        hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...seconds,
    });
}

function options(chart, width) {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const font = `11px ${colour("--font")}`;
    const grid = { stroke: colour("--grid"), width: 1 };
    return {
        width,
        height: HEIGHT,
        padding: [8, 10, 0, 0],
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 6 }, sync: { key: "neso" } },
        scales: {
            x: { time: true },
            y: { range: (plot, low, high) => [0, chart.most ?? Math.max((high ?? 0) * 1.1, chart.least ?? 0.01)] },
        },
        axes: [
            {
                stroke: colour("--muted"), font, grid: { show: false }, ticks: { ...grid, size: 4 }, size: 26, space: 52,
                values: (plot, splits) => splits.map((time) => formatTime(time, splits[1] - splits[0] < 60)),
            },
            {
                stroke: colour("--muted"), font, grid, ticks: { show: false }, size: 58, space: 32,
                values: (plot, splits) => splits.map((value) => (value === null ? "" : chart.format(value))),
            },
        ],
        series: [
            {},
            ...chart.series.map((series) => ({
                label: series.title,
                stroke: colour(`--series-${series.colour}`),
                width: 1.5,
                fill: chart.series.length === 1 ? colour("--series-fill") : undefined,
                points: { show: false },
                spanGaps: false,
            })),
        ],
    };
}
