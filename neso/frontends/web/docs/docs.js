// Shows the OpenAPI document. A key that was entered in the dashboard of this tab is sent with each request.
"use strict";

function savedAccess() {
    try {
        return JSON.parse(sessionStorage.getItem("neso.access")) ?? {};
    } catch {
        return {};
    }
}

globalThis.SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#swagger-ui",
    deepLinking: true,
    validatorUrl: null,
    requestInterceptor(request) {
        const { key, name, value } = savedAccess();
        if (key && !request.headers.Authorization) {
            request.headers.Authorization = `Bearer ${key}`;
        }
        if (name && value) {
            request.headers[name] = value;
        }
        return request;
    },
});
