"""What is run beside the service: by cron (`janitor`), all the time (`dispatcher`), or by Spark (`bulk_ack`)."""
