// The table of models, with their state, configuration and statistics, and loading and unloading.

import { getJson, postJson } from "./api.js";
import { CopyButton, Dialog, formatNumber, formatSeconds, html, useEffect, useState } from "./lib.js";

const STATES = {
    READY: ["good", "Ready"],
    LOADING: ["wait", "Loading"],
    UNLOADING: ["wait", "Unloading"],
    UNAVAILABLE: ["idle", "Not loaded"],
    "": ["idle", "Not loaded"],
};

function kindOf(model) {
    const kinds = [model.chat && "chat", model.completions && !model.chat && "completions",
        model.embeddings && "embeddings", model.images && "images"];
    return kinds.filter(Boolean).join(", ");
}

export function Models({ server, onChange, onTry }) {
    const [shown, setShown] = useState(null);
    const [busy, setBusy] = useState({});
    const [failure, setFailure] = useState(null);
    const controls = server.control === "explicit" && server.authorized;

    const control = async (name, action) => {
        setBusy((names) => ({ ...names, [name]: action }));
        setFailure(null);
        try {
            await postJson(`v1/models/${encodeURIComponent(name)}/${action}`, {});
        } catch (error) {
            setFailure(`${name}: ${error.message}`);
        }
        setBusy((names) => ({ ...names, [name]: undefined }));
        await onChange();
    };

    if (server.models.length === 0) {
        return html`<p class="empty">No models. Start the server with a model, for example:
            <code>neso serve Qwen/Qwen3-0.6B</code></p>`;
    }
    return html`
        ${failure && html`<p class="banner error" role="alert">${failure}</p>`}
        <div class="table-frame">
            <table class="models">
                <thead>
                    <tr><th>Name</th><th>State</th><th class="wide">Backend</th><th class="wide">Serves</th>
                        <th class="wide number">Context</th><th class="wide number">In flight</th>
                        <th><span class="hidden">Actions</span></th></tr>
                </thead>
                <tbody>
                    ${server.models.map((model) => html`
                        <${Row} key=${`${model.name}/${model.version}`} model=${model} busy=${busy[model.name]}
                            controls=${controls} onControl=${control} onTry=${onTry}
                            onShow=${() => setShown(model.name)} />`)}
                </tbody>
            </table>
        </div>
        <p class="hint">${server.control === "explicit"
        ? !server.authorized && "Enter a key to load and unload models."
        : "Models can be loaded and unloaded here with --model-control-mode=explicit."}</p>
        ${shown && html`<${Details} name=${shown} onClose=${() => setShown(null)} />`}
    `;
}

function Row({ model, busy, controls, onControl, onTry, onShow }) {
    const failed = model.state === "UNAVAILABLE" && model.reason && model.reason !== "unloaded";
    const [tone, title] = busy === "load" ? STATES.LOADING : busy === "unload" ? STATES.UNLOADING
        : failed ? ["bad", "Failed"] : STATES[model.state] ?? ["idle", model.state];
    const ready = model.state === "READY";
    return html`
        <tr data-model=${model.name}>
            <td><span class="name">${model.name}</span>
                ${model.version && html` <span class="version">v${model.version}</span>`}
                ${failed && html`<span class="reason">${model.reason}</span>`}
            </td>
            <td><span class="status ${tone}"><span class="dot" aria-hidden="true"></span>${title}</span></td>
            <td class="wide">${model.backend ?? ""}</td>
            <td class="wide">${kindOf(model)}</td>
            <td class="wide number">${model.max_model_len ? model.max_model_len.toLocaleString("en") : ""}</td>
            <td class="wide number">${ready ? model.in_flight ?? 0 : ""}</td>
            <td class="actions">
                ${ready && (model.completions || model.embeddings) && html`
                    <button type="button" onClick=${() => onTry(model.name)} aria-label="Try ${model.name}">
                        Try</button>`}
                ${ready && html`
                    <button type="button" onClick=${onShow} aria-label="Details of ${model.name}">Details</button>`}
                ${controls && (ready
        ? html`<button type="button" disabled=${Boolean(busy)} aria-label="Unload ${model.name}"
                        onClick=${() => onControl(model.name, "unload")}>Unload</button>`
        : html`<button type="button" disabled=${Boolean(busy) || ["LOADING", "UNLOADING"].includes(model.state)}
                        aria-label="Load ${model.name}" onClick=${() => onControl(model.name, "load")}>Load</button>`)}
            </td>
        </tr>
    `;
}

function Details({ name, onClose }) {
    const [details, setDetails] = useState(null);
    const [problem, setProblem] = useState("");
    useEffect(() => {
        getJson(`dashboard/models/${encodeURIComponent(name)}`).then(setDetails, (error) => setProblem(error.message));
    }, [name]);
    const config = details && JSON.stringify(details.config, null, 2);
    return html`
        <${Dialog} title=${name} onClose=${onClose}>
            ${problem && html`<p class="banner error" role="alert">${problem}</p>`}
            ${!details && !problem && html`<p class="empty">Loading…</p>`}
            ${details && html`
                <h3>Statistics</h3>
                <${Statistics} rows=${details.statistics} />
                <div class="section"><h3>Configuration</h3><${CopyButton} text=${config} /></div>
                <pre class="code" tabindex="0">${config}</pre>`}
        <//>
    `;
}

function Statistics({ rows }) {
    const mean = (duration) => Number(duration?.count) > 0
        ? formatSeconds(Number(duration.ns) / Number(duration.count) / 1e9) : "–";
    return html`
        <div class="table-frame"><table>
            <thead><tr><th>Version</th><th class="number">Succeeded</th><th class="number">Failed</th>
                <th class="number">Executions</th><th class="number">Mean time</th><th class="number">Mean queue</th>
                <th class="number">Mean compute</th></tr></thead>
            <tbody>
                ${rows.map((row) => html`
                    <tr><td>${row.version}</td>
                        <td class="number">${formatNumber(Number(row.inference_stats?.success?.count ?? 0))}</td>
                        <td class="number">${formatNumber(Number(row.inference_stats?.fail?.count ?? 0))}</td>
                        <td class="number">${formatNumber(Number(row.execution_count ?? 0))}</td>
                        <td class="number">${mean(row.inference_stats?.success)}</td>
                        <td class="number">${mean(row.inference_stats?.queue)}</td>
                        <td class="number">${mean(row.inference_stats?.compute_infer)}</td></tr>`)}
            </tbody>
        </table></div>
    `;
}
