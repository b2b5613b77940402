// The playground: choice of model and mode, parameters, and the panel of the mode.

import { access } from "./api.js";
import { Chat } from "./chat.js";
import { Completion } from "./completion.js";
import { Embeddings } from "./embeddings.js";
import { html, load, save, useEffect, useState } from "./lib.js";
import { DEFAULTS, Settings } from "./settings.js";
import { CodeDialog } from "./snippets.js";

const MODES = [["chat", "Chat"], ["completions", "Completion"], ["embeddings", "Embeddings"]];
const PANELS = { chat: Chat, completions: Completion, embeddings: Embeddings };

export function Playground({ hidden, server, model, onModel, onAccess }) {
    const usable = server.models.filter((each) => each.state === "READY" && (each.completions || each.embeddings));
    const chosen = usable.find((each) => each.name === model) ?? usable[0];
    const modes = MODES.filter(([name]) => chosen?.[name]);
    const [wanted, setWanted] = useState("chat");
    const mode = modes.some(([name]) => name === wanted) ? wanted : modes[0]?.[0];
    const [settings, setSettings] = useState(() => ({ ...DEFAULTS, ...load(localStorage, "neso.settings", {}) }));
    const [open, setOpen] = useState(false);
    const [code, setCode] = useState(null);
    const change = (values) => {
        setSettings(values);
        save(localStorage, "neso.settings", values);
    };
    useEffect(() => {
        if (!open) {
            return undefined;
        }
        const close = (event) => event.key === "Escape" && setOpen(false);
        addEventListener("keydown", close);
        return () => removeEventListener("keydown", close);
    }, [open]);

    if (!chosen) {
        return html`
            <div class="page" hidden=${hidden}>
                <p class="empty">No model that generates text is ready.
                    <a href="#/overview">See the states of the models</a></p>
            </div>`;
    }
    const Panel = PANELS[mode];
    return html`
        <div class="playground" hidden=${hidden}>
            <section class="stage" aria-label="Playground">
                <header class="bar">
                    <label class="inline"><span class="hidden">Model</span>
                        <select value=${chosen.name} onChange=${(event) => onModel(event.target.value)}>
                            ${usable.map((each) => html`<option value=${each.name}>${each.name}</option>`)}
                        </select>
                    </label>
                    ${modes.length > 1 && html`
                        <div class="segments" role="group" aria-label="Mode">
                            ${modes.map(([name, title]) => html`
                                <button type="button" aria-pressed=${mode === name}
                                    onClick=${() => setWanted(name)}>${title}</button>`)}
                        </div>`}
                    <span class="space"></span>
                    <button type="button" class="quiet narrow" aria-expanded=${open} aria-controls="settings"
                        onClick=${() => setOpen(!open)}>Parameters</button>
                </header>
                <${Panel} key=${mode} model=${chosen} settings=${settings} locked=${server.keys && !server.authorized}
                    onAccess=${onAccess} onCode=${(path, body) => setCode({ path, body })} />
            </section>
            <aside id="settings" class=${open ? "open" : ""} aria-label="Parameters">
                <header class="section narrow"><h2>Parameters</h2>
                    <button type="button" class="quiet icon" aria-label="Close parameters"
                        onClick=${() => setOpen(false)}>✕</button></header>
                ${mode === "embeddings"
        ? html`<p class="hint">Embeddings have no parameters.</p>`
        : html`<${Settings} settings=${settings} mode=${mode} onChange=${change} />`}
            </aside>
            ${code && html`
                <${CodeDialog} ...${code} hasKey=${access().key !== ""} onClose=${() => setCode(null)} />`}
        </div>
    `;
}
