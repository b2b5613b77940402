// The vendored libraries, and small helpers without state.

export const { Component, Fragment, createRef, h, render } = globalThis.preact;
export const { useCallback, useEffect, useMemo, useRef, useState } = globalThis.preactHooks;
export const html = globalThis.htm.bind(h);

/** Stored value of this browser, or `fallback`. `storage`: localStorage or sessionStorage. */
export function load(storage, key, fallback) {
    try {
        const text = storage.getItem(key);
        return text === null ? fallback : JSON.parse(text);
    } catch {
        return fallback;
    }
}

/** Store a value in this browser; null removes it. Returns false if storage is disabled or full. */
export function save(storage, key, value) {
    try {
        if (value === null) {
            storage.removeItem(key);
        } else {
            storage.setItem(key, JSON.stringify(value));
        }
        return true;
    } catch {
        return false; // the page works without storage
    }
}

/** Format a number with at most three significant digits: 1234 -> "1.23k". */
export function formatNumber(value) {
    if (value === null || value === undefined || Number.isNaN(value)) {
        return "–";
    }
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
        if (Math.abs(value) >= size) {
            const divisor = unit === "k" ? 1e3 : size;
            return `${Number((value / divisor).toPrecision(3))}${unit}`;
        }
    }
    return Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
}

/** Format seconds: 0.0123 -> "12.3 ms". */
export function formatSeconds(value) {
    if (value === null || value === undefined || Number.isNaN(value)) {
        return "–";
    }
    if (value < 1) {
        return `${Number((value * 1000).toPrecision(3))} ms`;
    }
    return value < 120 ? `${Number(value.toPrecision(3))} s` : `${Math.round(value / 60)} min`;
}

/** Format a fraction: 0.123 -> "12.3%". */
export function formatPercent(value) {
    return value === null || value === undefined || Number.isNaN(value)
        ? "–"
        : `${Number((value * 100).toFixed(1))}%`;
}

/** Copy text. Returns whether it worked; without HTTPS, browsers have no clipboard API. */
export async function copyText(text) {
    if (navigator.clipboard) {
        try {
            await navigator.clipboard.writeText(text);
            return true;
        } catch {
            return false;
        }
    }
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    return copied;
}

/** A button that copies `text`. */
export function CopyButton({ text, label = "Copy" }) {
    const [copied, setCopied] = useState(false);
    const copy = async () => {
        setCopied(await copyText(text));
        setTimeout(() => setCopied(false), 1500);
    };
    return html`<button type="button" class="quiet" onClick=${copy}>${copied ? "Copied" : label}</button>`;
}

/** A modal dialog. `onClose` is called when it is dismissed; Escape dismisses it. */
export function Dialog({ title, onClose, children }) {
    const dialog = useRef(null);
    useEffect(() => {
        dialog.current.showModal();
    }, []);
    return html`
        <dialog ref=${dialog} aria-label=${title} onClose=${onClose}
            onClick=${(event) => event.target === dialog.current && dialog.current.close()}>
            <div class="dialog-content">
                <header>
                    <h2>${title}</h2>
                    <button type="button" class="quiet icon" aria-label="Close"
                        onClick=${() => dialog.current.close()}>✕</button>
                </header>
                ${children}
            </div>
        </dialog>
    `;
}
