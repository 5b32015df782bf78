"""Programs that run beside the service: by cron (`janitor`), permanently (`dispatcher`), or by Spark (`bulk_ack`,
`tally_stream`)."""
