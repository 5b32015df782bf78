"""Programs that run next to the service: from cron (`janitor`), permanently (`dispatcher`), or on Spark (`bulk_ack`,
`tally_stream`)."""
