// Sets the colour scheme before the first paint. A classic script, because modules run after it.
"use strict";

(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");

    function apply() {
        let chosen = null;
        try {
            chosen = localStorage.getItem("neso.theme");
        } catch {
            // storage is disabled: follow the system
        }
        document.documentElement.dataset.theme = chosen || (dark.matches ? "dark" : "light");
        dispatchEvent(new Event("neso-theme"));
    }

    apply();
    dark.addEventListener("change", apply);
    addEventListener("storage", apply);
    addEventListener("neso-theme-chosen", apply);
})();
