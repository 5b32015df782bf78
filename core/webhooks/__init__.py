"""Webhooks: subscriptions to the feed, and the delivery of its events.

`subscriptions` has the webhooks, the log of their deliveries and the signed message. `deliveries` plans, claims and
records deliveries; the dispatcher calls it. `addresses` decides where a webhook may lead, `backoff` when a delivery is
tried again, `replicas` how dispatchers share the work.

Sending itself is outside of core: `senders` implements `subscriptions.Sender`.
"""
