"""Webhooks: subscriptions to the feed, and the delivery of its events.

`subscriptions` has the webhooks. `deliveries` plans, claims and records deliveries; the dispatcher calls it.
`callbacks` plans those of the webhooks that belong to one batch each.
`delivery_log` lists deliveries with their attempts, and makes them due again. `message` builds the signed request,
and `rotation` gives a webhook a new secret.
`addresses` checks a webhook's URL and addresses, `backoff` computes the time of the next attempt, and `replicas` shares
the work among dispatchers.

Sending itself is outside of core: `senders` implements `sender.Sender`.
"""
