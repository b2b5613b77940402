// The overview: key figures, charts and models.

import { CHARTS, Chart } from "./charts.js";
import { formatNumber, formatPercent, formatSeconds, html, load, save, useState } from "./lib.js";
import { Models } from "./models.js";

const SPANS = [[300, "5 min"], [900, "15 min"], [3600, "1 hour"]];
const LATEST = 60;

export function Overview({ server, history, onChange, onTry }) {
    const [model, setModel] = useState("");
    const [span, setSpan] = useState(() => load(localStorage, "neso.span", 300));
    const chosen = history.models().includes(model) ? model : "";
    const chooseSpan = (event) => {
        setSpan(Number(event.target.value));
        save(localStorage, "neso.span", Number(event.target.value));
    };
    return html`
        <div class="page">
            <${Tiles} server=${server} history=${history} model=${chosen || null} />
            <section aria-labelledby="models-title">
                <header class="section"><h2 id="models-title">Models</h2></header>
                <${Models} server=${server} onChange=${onChange} onTry=${onTry} />
            </section>
            <section aria-labelledby="charts-title">
                <header class="section">
                    <h2 id="charts-title">Activity</h2>
                    ${server.metrics && html`
                        <div class="row">
                            <label class="inline">Model
                                <select value=${chosen} onChange=${(event) => setModel(event.target.value)}>
                                    <option value="">All</option>
                                    ${history.models().map((name) => html`<option value=${name}>${name}</option>`)}
                                </select>
                            </label>
                            <label class="inline">Last
                                <select value=${span} onChange=${chooseSpan}>
                                    ${SPANS.map(([value, title]) => html`<option value=${value}>${title}</option>`)}
                                </select>
                            </label>
                        </div>`}
                </header>
                ${server.metrics
        ? html`<div class="charts">
                        ${CHARTS.map((chart) => html`
                            <${Chart} key=${chart.title} chart=${chart} history=${history} model=${chosen || null}
                                span=${span} />`)}
                    </div>`
        : html`<p class="empty">Charts need the server's metrics, which are off (--allow-metrics=false).</p>`}
            </section>
        </div>
    `;
}

function Tiles({ server, history, model }) {
    const ready = server.models.filter((each) => each.state === "READY").length;
    const last = (values) => values.at(-1) ?? null;
    const figures = server.metrics
        ? [
            ["Output", formatNumber(last(history.rate(LATEST, model, "outputTokens"))), "tokens/s"],
            ["Requests", formatNumber(last(history.gauge(LATEST, model, "running"))),
                `running, ${formatNumber(last(history.gauge(LATEST, model, "waiting")) ?? 0)} waiting`],
            ["Time to first token", formatSeconds(last(history.quantile(LATEST, model, "firstToken", 0.5, LATEST))),
                "median, last minute"],
            ["Between tokens", formatSeconds(last(history.quantile(LATEST, model, "interToken", 0.5, LATEST))),
                "median, last minute"],
            ["KV cache", formatPercent(last(history.gauge(LATEST, model, "kvUsage", "max"))), "in use"],
            ["Prefix cache", formatPercent(last(history.ratio(LATEST, model, "prefixHits", "prefixQueries", LATEST))),
                "hits, last minute"],
        ]
        : [];
    return html`
        <dl class="tiles" aria-label="Key figures">
            <div class="tile">
                <dt>Models</dt><dd>${ready}<small> of ${server.models.length}</small></dd><dd class="unit">ready</dd>
            </div>
            ${figures.map(([title, value, unit]) => html`
                <div class="tile"><dt>${title}</dt><dd>${value}</dd><dd class="unit">${unit}</dd></div>`)}
        </dl>
    `;
}
