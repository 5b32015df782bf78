"""The fast path: plain requests for the verbs that are called most are answered in uvicorn's protocol.

An HTTP framework around such a request costs several times as much as the request's share of a merged transaction: a
task, an ASGI cycle of four messages and two writes. So plain requests (HTTP/1.1, kept alive, a JSON body of known
length, no other request in progress on their connection) are parsed, queued and answered here, each response in one
write. All other requests take the ordinary path, so no rule of HTTP is implemented twice.

`protocol` has the table of verbs, and gives each request to its verb, or to the ordinary path. `acks` are the two verbs
that are called once per item. `verbs` are those whose routes are FastAPI's. `exchange` is one request and its response,
in the place of uvicorn's cycle, and the connection that carries it. A new verb is a line in `verbs`.
"""
