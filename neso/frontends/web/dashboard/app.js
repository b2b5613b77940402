// The page: navigation, polling of the server, access dialog.

import { ApiError, access, getJson, getText, setAccess, url } from "./api.js";
import { MetricHistory, parseMetrics } from "./history.js";
import { Dialog, html, load, render, save, useEffect, useRef, useState } from "./lib.js";
import { Overview } from "./overview.js";
import { Playground } from "./playground.js";

const STATE_INTERVAL = 3000;
const METRICS_INTERVAL = 2000;
const PAGES = [["overview", "Overview"], ["playground", "Playground"]];

/** Call `work` now and every `interval` ms while the page is visible; not before the last call has ended. */
function usePolling(work, interval, enabled) {
    const latest = useRef(work);
    latest.current = work;
    useEffect(() => {
        if (!enabled) {
            return undefined;
        }
        let timer = 0;
        let ended = false;
        const poll = async () => {
            clearTimeout(timer);
            if (document.visibilityState === "visible") {
                await latest.current();
            }
            if (!ended) {
                clearTimeout(timer);
                timer = setTimeout(poll, interval);
            }
        };
        const onVisible = () => document.visibilityState === "visible" && poll();
        document.addEventListener("visibilitychange", onVisible);
        poll();
        return () => {
            ended = true;
            clearTimeout(timer);
            document.removeEventListener("visibilitychange", onVisible);
        };
    }, [interval, enabled]);
}

function currentPage() {
    const name = location.hash.replace(/^#\/?/, "").split("/")[0];
    return PAGES.some(([known]) => known === name) ? name : "overview";
}

function App() {
    const [page, setPage] = useState(currentPage);
    const [server, setServer] = useState(null);
    const [problem, setProblem] = useState(null);
    const [dialog, setDialog] = useState(false);
    const [, setSamples] = useState(0);
    const [model, setModel] = useState(() => load(sessionStorage, "neso.model", ""));
    const history = useRef(null);
    history.current ??= new MetricHistory();

    const refresh = async () => {
        try {
            setServer(await getJson("dashboard/state"));
            setProblem(null);
        } catch (error) {
            setProblem(error);
            if (error instanceof ApiError && error.status === 0) {
                setServer((known) => known && { ...known, ready: false });
            }
        }
    };
    const scrape = async () => {
        try {
            const text = await getText("dashboard/metrics");
            history.current.add(Date.now() / 1000, parseMetrics(text));
            setSamples((count) => count + 1);
        } catch {
            // the poll of the state reports the problem
        }
    };
    usePolling(refresh, STATE_INTERVAL, true);
    usePolling(scrape, METRICS_INTERVAL, server !== null && server.metrics);
    useEffect(() => {
        const onHash = () => setPage(currentPage());
        addEventListener("hashchange", onHash);
        return () => removeEventListener("hashchange", onHash);
    }, []);

    const choose = (name) => {
        setModel(name);
        save(sessionStorage, "neso.model", name);
    };
    const openPlayground = (name) => {
        choose(name);
        location.hash = "#/playground";
    };
    const locked = problem instanceof ApiError && [401, 403].includes(problem.status);
    return html`
        <a class="skip" href="#main" onClick=${skipToMain}>Skip to content</a>
        <${Header} page=${page} server=${server} problem=${problem} onAccess=${() => setDialog(true)} />
        <main id="main" tabindex="-1">
            ${locked && html`<${Locked} problem=${problem} onAccess=${() => setDialog(true)} />`}
            ${problem && !locked && html`<p class="banner error" role="alert">${problem.message}</p>`}
            ${server && page === "overview" && html`
                <${Overview} server=${server} history=${history.current} onChange=${refresh}
                    onTry=${openPlayground} />`}
            ${server && html`
                <${Playground} hidden=${page !== "playground"} server=${server} model=${model} onModel=${choose}
                    onAccess=${() => setDialog(true)} />`}
            ${!server && !problem && html`<p class="empty">Connecting…</p>`}
        </main>
        ${dialog && html`<${AccessDialog} onClose=${() => setDialog(false)} onSave=${refresh} />`}
    `;
}

function skipToMain(event) {
    event.preventDefault();
    document.getElementById("main").focus();
}

function Header({ page, server, problem, onAccess }) {
    const status = problem?.status === 0 ? ["bad", "Unreachable"]
        : server === null ? ["idle", "Connecting"]
            : server.ready ? ["good", "Ready"] : ["wait", "Not ready"];
    const readOnly = server !== null && server.keys && !server.authorized;
    return html`
        <header class="top">
            <a class="brand" href="#/overview" aria-label="Neso, overview">
                <img src=${url("static/dashboard/icon.svg")} alt="" width="22" height="22" />
                <span>Neso</span>
                ${server && html`<span class="version">${server.version}</span>`}
            </a>
            <nav aria-label="Pages">
                ${PAGES.map(([name, title]) => html`
                    <a href="#/${name}" aria-current=${page === name ? "page" : null}>${title}</a>`)}
                <a href="docs">API</a>
            </nav>
            <div class="tools">
                <span class="status ${status[0]}" role="status">
                    <span class="dot" aria-hidden="true"></span><span class="wide">${status[1]}</span>
                </span>
                <button type="button" class="quiet" onClick=${onAccess}>
                    ${readOnly ? "Enter key" : "Access"}
                </button>
                <${ThemeButton} />
            </div>
        </header>
    `;
}

function ThemeButton() {
    const [theme, setTheme] = useState(document.documentElement.dataset.theme);
    useEffect(() => {
        const update = () => setTheme(document.documentElement.dataset.theme);
        addEventListener("neso-theme", update);
        return () => removeEventListener("neso-theme", update);
    }, []);
    const other = theme === "dark" ? "light" : "dark";
    const toggle = () => {
        try {
            localStorage.setItem("neso.theme", other);
        } catch {
            // storage is disabled: the choice cannot be kept
        }
        dispatchEvent(new Event("neso-theme-chosen"));
    };
    return html`
        <button type="button" class="quiet icon" onClick=${toggle} aria-label="Use ${other} colours"
            title="Use ${other} colours">
            <svg viewBox="0 0 20 20" width="16" height="16" aria-hidden="true">
                ${theme === "dark"
        ? html`<circle cx="10" cy="10" r="4" fill="currentColor" />
                    <path d="M10 1v3M10 16v3M1 10h3M16 10h3M3.6 3.6l2 2M14.4 14.4l2 2M3.6 16.4l2-2M14.4 5.6l2-2"
                        stroke="currentColor" stroke-width="1.6" stroke-linecap="round" />`
        : html`<path d="M15.5 12.5A6.5 6.5 0 0 1 7.5 4.5a6.5 6.5 0 1 0 8 8z" fill="currentColor" />`}
            </svg>
        </button>
    `;
}

function Locked({ problem, onAccess }) {
    return html`
        <section class="empty" role="alert">
            <h2>${problem.status === 401 ? "This server requires a key" : "This part of the server is restricted"}</h2>
            <p>${problem.message}</p>
            <button type="button" class="primary" onClick=${onAccess}>Enter key</button>
        </section>
    `;
}

function AccessDialog({ onClose, onSave }) {
    const [values, setValues] = useState(access);
    const edit = (name) => (event) => setValues({ ...values, [name]: event.target.value.trim() });
    const submit = (event) => {
        event.preventDefault();
        setAccess(values.key || values.name ? values : null);
        onSave();
        event.target.closest("dialog").close();
    };
    const forget = (event) => {
        setAccess(null);
        onSave();
        event.target.closest("dialog").close();
    };
    return html`
        <${Dialog} title="Access" onClose=${onClose}>
            <form class="stack" onSubmit=${submit}>
                <label>API key
                    <input type="password" autocomplete="off" spellcheck="false" value=${values.key}
                        onInput=${edit("key")} />
                </label>
                <fieldset>
                    <legend>Header of restricted APIs</legend>
                    <div class="pair">
                        <label>Name <input autocomplete="off" spellcheck="false" value=${values.name}
                            onInput=${edit("name")} placeholder="admin-key" /></label>
                        <label>Value <input type="password" autocomplete="off" value=${values.value}
                            onInput=${edit("value")} /></label>
                    </div>
                </fieldset>
                <p class="hint">Kept until this tab is closed, and sent to this server only.</p>
                <div class="row end">
                    <button type="button" class="quiet" onClick=${forget}>Forget</button>
                    <button type="submit" class="primary">Save</button>
                </div>
            </form>
        <//>
    `;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);
