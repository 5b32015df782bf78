"""What is run beside the service: by cron (`janitor`) or by Spark (`bulk_ack`)."""
